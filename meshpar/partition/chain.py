"""Cuts the traced loss of a model at its stacks of layers, one after the other.

What stands after one stack may have another, as a decoder follows an encoder, and is cut again. What stands between two
stacks is computed by the stage where the second begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from jax.extend.core import ClosedJaxpr

from meshpar.errors import ShardingError
from meshpar.partition.blocks import blocks, sunk
from meshpar.partition.counters import counters_apart
from meshpar.partition.cut import OF_ALL_LAYERS, Argument, Cut
from meshpar.partition.cutter import cut_at, is_in
from meshpar.partition.scans import flattened, half_stacked, scans
from meshpar.partition.source import Source
from meshpar.partition.stack import Own, Stack, arguments_of


def cut(closed: ClosedJaxpr, arguments: Sequence[Argument], num_params: int, num_batch: int, num_carried: int) -> Cut:
    """Cuts a loss.

    Args:
      arguments: the parameters, the arrays of the batch, the key, and the carried state. The last results of the loss
        are the next carried state.

    Raises:
      ShardingError: it has no stack of layers, or a value cannot cross the cut.
    """
    flat = sunk(counters_apart(flattened(closed)), num_params, num_batch)
    stacks = _stacks(flat, arguments, num_params)
    if not stacks:
        raise ShardingError(_half_stacked(flat, arguments, num_params) or _NOTHING)

    def size(stack: Stack) -> int:
        return sum(math.prod(arguments[i].aval.shape) for i in arguments_of(stack.own))

    by_size = sorted(stacks, key=size, reverse=True)
    several = _apart([stack for stack in by_size if size(stack) >= MATTERS * size(by_size[0])])
    errors = []
    for tried in [*([several] if len(several) > 1 else []), *([stack] for stack in by_size)]:
        try:
            found = _chain(flat, [arguments_of(s.own) for s in tried], arguments, num_params, num_batch, num_carried)
            return _without_others(found, arguments)
        except ShardingError as error:
            errors.append(error)
    raise errors[-len(by_size)]


MATTERS = 1 / 8
"""The parameters of a further stack that is cut, of those of the largest. A smaller one belongs to an end."""


def _stacks(flat: ClosedJaxpr, arguments: Sequence[Argument], num_params: int) -> list[Stack]:
    dims = [argument.dims for argument in arguments]
    return [*scans(flat, dims, num_params), *_lists(flat, arguments[:num_params])]


def _half_stacked(flat: ClosedJaxpr, arguments: Sequence[Argument], num_params: int) -> str | None:
    found = half_stacked(flat, [argument.dims for argument in arguments], num_params)
    if found is None:
        return None
    eqn, *owns = found
    stacked, listed = (", ".join(arguments[i].name for i in own) for own in owns)
    how = f"scans {stacked}, which is stacked in dim layers, and {listed} of a list" if listed else ""
    how = how or f"reads {stacked}, which is stacked in dim layers, one row at a time"
    what = f"{Source.of(eqn).line}: a pipeline cannot cut the model here: a layer {how}"
    return f"{what}; stack all parameters of the layers and scan them, or keep all of them in a list"


def _apart(stacks: Sequence[Stack]) -> list[Stack]:
    """Those stacks that share no operation and no parameter with one before them, in the order of the program."""
    kept: list[Stack] = []
    for one in stacks:
        apart = all(one.stop <= x.start or x.stop <= one.start for x in kept)
        if apart and not any({*arguments_of(one.own)} & {*arguments_of(x.own)} for x in kept):
            kept.append(one)
    return sorted(kept, key=lambda stack: stack.start)


def _chain(
    flat: ClosedJaxpr,
    owns: Sequence[tuple[int, ...]],
    arguments: Sequence[Argument],
    num_params: int,
    num_batch: int,
    num_carried: int,
    num_given: int = 0,
) -> Cut:
    """Cuts at the stack with the first parameters of `owns`, and what stands after it at that with the next ones.

    Args:
      num_given: how many of the last arguments are the message of the stack before.
    """
    stack = next((s for s in _stacks(flat, arguments, num_params) if {*arguments_of(s.own)} == {*owns[0]}), None)
    if stack is None:
        raise ShardingError("what stands after a stack of layers has no longer the next one")
    is_only = len(owns) == 1 and not num_given
    found = cut_at(flat, stack, arguments, num_params, num_batch, num_carried, num_given, is_only)
    if len(owns) == 1:
        return found
    message = [Argument("a message", v.aval) for v in found.last.jaxpr.invars[len(found.outer) :]]
    place = {i: n for n, i in enumerate(found.outer)}
    rest = _chain(
        found.last,
        [tuple(place[i] for i in own) for own in owns[1:]],
        [*(arguments[i] for i in found.outer), *message],
        num_params - len(found.of_layers),
        num_batch,
        0,
        len(message),
    )
    return replace(found, then=_renumbered(rest, found.outer))


def _renumbered(cut: Cut, numbers: Sequence[int]) -> Cut:
    """The cut with the arguments' numbers in a program of more arguments."""

    def new(own: Own) -> Own:
        return tuple(numbers[i] for i in own) if isinstance(own, tuple) else numbers[own]

    return replace(
        cut,
        own=tuple(map(new, cut.own)),
        data=tuple(numbers[i] for i in cut.data),
        outer=tuple(numbers[i] for i in cut.outer),
        then=_renumbered(cut.then, numbers) if cut.then else None,
    )


def _without_others(cut: Cut, arguments: Sequence[Argument]) -> Cut:
    """The cut whose ends do not take the parameters of any stack's layers."""
    of_layers = {i for one in cut.stacks for i in one.of_layers}

    def trimmed(one: Cut, closed: ClosedJaxpr) -> ClosedJaxpr:
        jaxpr = closed.jaxpr
        dropped = {v: i for v, i in zip(jaxpr.invars, one.outer, strict=False) if i in of_layers}
        for eqn in jaxpr.eqns:
            for v in eqn.invars:
                if is_in(v, {*dropped}):
                    raise ShardingError(f"{Source.of(eqn).line}: {arguments[dropped[v]].name}: {OF_ALL_LAYERS}")
        return closed.replace(jaxpr=jaxpr.replace(invars=[v for v in jaxpr.invars if v not in dropped]))

    def of(one: Cut) -> Cut:
        last = one.last if one.then else trimmed(one, one.last)
        outer = tuple(i for i in one.outer if i not in of_layers)
        return replace(
            one, first=trimmed(one, one.first), last=last, outer=outer, then=of(one.then) if one.then else None
        )

    return of(cut)


_NOTHING = (
    "parallel.pipeline cuts a model between equal layers, and the loss has none: no scan over parameters whose first "
    "dim is called layers, and no parameters with numbered paths that are used by equal operations one after the "
    "other; apply the layers by nn.scan(..., metadata_params={nn.PARTITION_NAME: 'layers'}), by nnx.scan, or by "
    "jax.lax.scan with dims={'layers.*': ('layers', ...)}; or in a list, one layer after the other; or mark them by "
    "meshpar.layers"
)


def _lists(flat: ClosedJaxpr, params: Sequence[Argument]) -> Iterator[Stack]:
    sizes = [(p.aval.shape, p.aval.dtype, p.dims) for p in params]
    return blocks(flat, [p.name.removesuffix(".value") for p in params], sizes)
