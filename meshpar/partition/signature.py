"""A signature says which dims of an operation's operands and results correspond, as an einsum does.

From it and the operands' layouts `assign` decides which axes shard each dim while the operation runs. The order is
fixed: operands that a rule of the user shards come first, then larger ones, then earlier ones. The first operand that
shards a dim decides for all, and an axis shards one dim only. Whatever disagrees is moved: sliced, which is free, or
exchanged, or gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax

from meshpar.mesh.varying import Axes
from meshpar.partition.layout import Layout, count

Label: TypeAlias = Hashable
Labels: TypeAlias = tuple[Label | None, ...]
"""A label for each dim of an array; None for a dim that has to be whole."""
Assigned = dict[Label, Axes]
"""Label -> the axes that shard the dims with it."""


@dataclass(frozen=True)
class Call:
    """What a `compute` gets beside the local shards.

    Args:
      assigned: label -> the axes that shard it.
      local_shapes: the shape of each local result.
      sizes: mesh axis -> its size.
    """

    assigned: Assigned
    local_shapes: tuple[tuple[int, ...], ...]
    sizes: Any

    def axes(self, *labels: Label) -> Axes:
        """The axes that shard any of these labels."""
        return tuple(axis for label in labels for axis in self.assigned.get(label, ()))


Compute = Callable[..., Sequence[jax.Array]]
"""(call, *local shards) -> local results."""


@dataclass(frozen=True)
class Signature:
    """The labels of an operation's operands and results, and what it computes on local shards.

    Args:
      ins, outs: the labels of each operand and of each result.
      compute: what each device computes.
      summed: labels of operands over whose axes the results are partial sums.
      closed: labels over whose axes `compute` communicates itself, so that its results are the same on all of them.
      whole: labels that no axis shards, and that only pass on the names of their dims.
      linear: whether pending sums may pass to the result: `one` if at most one operand has any, `all` if all operands
        have the same, `no` if the operation needs their values.
      views: whether the results are the operands in another form, so that they stay pinned where all operands are.
      pins: whether other operands move to the results, as to a parameter that a rule shards.
      is_product: whether the results are linear in each operand, as those of a product are.
      equation: the letters of the first two operands and of their product, if `streamed` can compute it in chunks.
      then: (call, that product, *other operands) -> local results; None if the product is the result.
    """

    ins: tuple[Labels, ...]
    outs: tuple[Labels, ...]
    compute: Compute
    summed: tuple[Label, ...] = ()
    closed: tuple[Label, ...] = ()
    whole: tuple[Label, ...] = ()
    linear: Literal["no", "one", "first", "all"] = "no"
    views: bool = False
    pins: bool = False
    is_product: bool = False
    equation: tuple[str, str, str] | None = None
    then: Compute | None = None

    def check(self, assigned: Assigned) -> None:
        """Raises AssertionError if an axis that shards an operand neither shards a result nor ends in it as a sum.

        By this law a value that is typed as varying over an axis, and is neither sharded nor pending there, is a copy.
        """
        for labels in self.outs:
            ends = {*labels, *self.summed, *self.closed}
            lost = {label for label in assigned if label not in ends and assigned[label]}
            if lost and any(label in ins for ins in self.ins for label in lost):
                raise AssertionError(f"results lose the axes that shard {lost}")


@dataclass(frozen=True)
class Operand:
    """What is known of an operand before its dims are assigned.

    Args:
      layout: its layout; that which it would have for a value that is not computed yet.
      wanted: the axes that it would shard, where its pending sums end.
      is_made: whether the value exists. One that does not takes any layout at no cost, so that it decides last.
    """

    layout: Layout
    wanted: tuple[Axes, ...]
    is_made: bool = True

    @property
    def priority(self) -> tuple[bool, bool, int]:
        size = self.layout.dtype.itemsize if hasattr(self.layout.dtype, "itemsize") else 0
        for dim in self.layout.shape:
            size *= dim
        return (not self.layout.is_pinned, not self.is_made, -size)


def assign(signature: Signature, operands: Sequence[Operand], sizes: Any) -> Assigned:
    """Decides which axes shard each label. They divide all dims with it, which may have different sizes."""
    assigned: Assigned = {}
    taken: set[str] = set()
    lengths: dict[Label, set[int]] = {}
    for labels, operand in zip(signature.ins, operands, strict=True):
        for label, size in zip(labels, operand.layout.shape, strict=True):
            lengths.setdefault(label, set()).add(size)
    order = sorted(range(len(operands)), key=lambda i: (*operands[i].priority, i))
    for i in order:
        for label, axes in zip(signature.ins[i], operands[i].wanted, strict=True):
            if label is None or label in assigned or label in signature.whole:
                continue
            free = tuple(axis for axis in axes if axis not in taken)
            is_even = not any(size % count(free, sizes) for size in lengths[label])
            if free and free == axes[: len(free)] and is_even:
                assigned[label] = free
                taken |= {*free}
    return assigned


def sharded(labels: Labels, assigned: Assigned) -> tuple[Axes, ...]:
    """The axes that shard each dim of an array with these labels."""
    return tuple(assigned.get(label, ()) if label is not None else () for label in labels)
