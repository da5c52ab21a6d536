"""Collectives by hand, for use within a `jax.shard_map`: algorithms as tables, run, checked and compared."""

from meshpar.collectives.algorithms import algorithms, plan
from meshpar.collectives.choose import choose, seconds
from meshpar.collectives.execute import execute
from meshpar.collectives.operations import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from meshpar.collectives.plan import Permute, Plan
from meshpar.collectives.simulate import check, simulate

__all__ = [
    "Permute",
    "Plan",
    "algorithms",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "check",
    "choose",
    "execute",
    "gather",
    "plan",
    "reduce",
    "reduce_scatter",
    "scatter",
    "seconds",
    "simulate",
]
