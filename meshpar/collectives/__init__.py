"""Collectives for use within a `jax.shard_map`. Each algorithm is a table, which can be run, checked and compared."""

from meshpar.collectives.algorithms import algorithms, plan
from meshpar.collectives.execute import execute
from meshpar.collectives.hierarchical import hierarchical_all_reduce
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
from meshpar.collectives.powersgd import PowerSGD
from meshpar.collectives.quantize import Float8, Int8, OneBit
from meshpar.collectives.ragged import ragged_all_to_all
from meshpar.collectives.reduction import Bfloat16, Exact
from meshpar.collectives.select import seconds, select
from meshpar.collectives.simulate import check, simulate

__all__ = [
    "Bfloat16", "Exact", "Float8", "Int8", "OneBit", "Permute", "Plan", "PowerSGD", "algorithms", "all_gather",
    "all_reduce", "all_to_all", "broadcast", "check", "execute", "gather", "hierarchical_all_reduce", "plan",
    "ragged_all_to_all", "reduce", "reduce_scatter", "scatter", "seconds", "select", "simulate",
]  # fmt: skip
