"""Products that gather a weight in chunks while they multiply, as meshpar's own layers do: `parallel.fsdp.overlap`."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from meshpar.collectives.matmul import all_gather_matmul
from meshpar.collectives.ring import Ring
from meshpar.partition.plan import Deferred, Placed, Scope
from meshpar.partition.signature import Call, Labels, Signature, sharded


def in_chunks(scope: Scope, eqn: Any, signature: Signature, nodes: Sequence[Any]) -> int | None:
    """The operand of a product whose shards travel while it multiplies; None for a product without such an operand.

    It is a parameter of which one dim is stored in shards, and which nothing else reads. A product in a derivative of
    the user's own is computed as it is written.
    """
    if not scope.ctx.parallel.fsdp.in_chunks or signature.equation is None or scope.is_derivative:
        return None
    found = [i for i, node in enumerate(nodes) if _is_stored(node)]
    if len(found) != 1 or isinstance(nodes[1 - found[0]], Deferred):
        return None
    (of_w,) = found
    others = [node if i == of_w else scope.ready(node, scope.source(eqn)) for i, node in enumerate(nodes)]
    is_as_stored = sharded(signature.ins[of_w], scope.assigned(signature, others)) == nodes[of_w].layout.axes
    if not is_as_stored:
        return None
    scope.in_chunks.append(scope.source(eqn).line)
    return of_w


def _is_stored(node: Any) -> bool:
    is_alone = isinstance(node, Placed) and node.uses == 1 and node.whole is None
    return is_alone and len(node.layout.stored) == 1


def gathering(scope: Scope, signature: Signature, nodes: Sequence[Any], of_w: int) -> Signature:
    """The signature of a product that gathers its operand `of_w` itself.

    Communication: that of `all_gather_matmul`.
    """
    assert signature.equation is not None
    *operands, result = signature.equation
    ((dim, axes),) = nodes[of_w].layout.stored
    ring = Ring(axes, both_ways=scope.ctx.parallel.fsdp.overlap == "bidirectional")
    equation = f"{operands[of_w]},{operands[1 - of_w]}->{result}"

    def compute(call: Call, *shards: jax.Array) -> Sequence[jax.Array]:
        return all_gather_matmul(equation, shards[of_w], [shards[1 - of_w]], ring, dim=operands[of_w][dim])

    return replace(signature, compute=compute, equation=None)


def lettered(ins: Sequence[Labels], out: Labels) -> tuple[str, str, str]:
    """The labels of two operands and of their product as letters."""
    letters = dict(zip(dict.fromkeys((*ins[0], *ins[1])), string.ascii_lowercase, strict=False))
    left, right, result = ("".join(letters[label] for label in labels) for labels in (*ins, out))
    return left, right, result
