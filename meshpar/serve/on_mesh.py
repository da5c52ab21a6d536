"""Where the parameters of a trained model are on a mesh that generates."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from meshpar.parallel.context import ParallelContext
from meshpar.parallel.strategies import Parallel
from meshpar.sharding.resolve import resolve
from meshpar.sharding.rules import UNNAMED, AxisRules
from meshpar.train.state import stored

ACTIVATION_DIMS = ("batch", "seq", "residual_seq", UNNAMED)
"""The dims that a user's own model may have in its activations only, whose rules need no parameter."""


def placements(specs: Any, ctx: ParallelContext, activation_dims: Collection[str] | None = None) -> Any:
    """A tree of `Placement` of stored parameters; see `resolve`."""
    return stored(resolve(specs, ctx.rules, ctx.mesh, activation_dims=activation_dims), ctx.rules)


def for_tokens(ctx: ParallelContext) -> ParallelContext:
    """The context of a training without sequence parallelism, microbatches and strategies, for one token per row.

    The axes that sharded the sequence shard the batch instead.
    """
    rules = ctx.rules
    tokens = {"batch": rules["batch"] + rules["seq"], "seq": (), "residual_seq": ()}
    whole = AxisRules(preset=rules.preset, zero=rules.zero, **rules.explicit | tokens)  # pyright: ignore
    return replace(ctx, rules=whole, parallel=Parallel(), num_microbatches=1)
