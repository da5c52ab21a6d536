"""What rules are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshpar.partition.plan import Scope
from meshpar.partition.signature import Call, Signature

Rule = Callable[[Scope, Any, list[Any]], Sequence[Any]]
"""(scope, equation, nodes of its operands) -> nodes of its results."""


def signed(signature: Callable[[Any], Signature]) -> Rule:
    """The rule of a primitive whose signature follows from its equation alone."""

    def rule(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
        return scope.operation(eqn, signature(eqn), nodes)

    return rule


def bind(eqn: Any, *shards: jax.Array, **changes: Any) -> list[jax.Array]:
    """The operation of an equation on local shards, with changes to its parameters.

    A declared sharding is of the whole result; `constraints.following` follows it.
    """
    local = {key: None for key in ("sharding", "out_sharding") if key in eqn.params}
    results = eqn.primitive.bind(*shards, **(eqn.params | local | changes))
    return list(results) if eqn.primitive.multiple_results else [results]


def same(eqn: Any) -> Callable[..., list[jax.Array]]:
    """A `compute` that does on shards what the equation does on whole arrays."""

    def compute(call: Call, *shards: jax.Array) -> list[jax.Array]:
        return bind(eqn, *shards)

    return compute


def dims(aval: Any, *blocked: int) -> tuple[int | None, ...]:
    """The positions of an array's dims as labels; None for those that have to be whole."""
    return tuple(None if i in blocked else i for i in range(aval.ndim))
