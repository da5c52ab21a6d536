"""Reads the communication of a program from its jaxpr, without compiling it.

A manual region (`shard_map`) names each collective that it runs, so its jaxpr gives the bytes of any model, on any
mesh, for every backend.

A compiler may send less: XLA:CPU moves a collective out of a loop in which its operand does not change, and merges
equal collectives. `inspection.program.hlo` reads the collectives of compiled programs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from meshpar.cost.walk import Visit, walk
from meshpar.errors import ProgramError
from meshpar.mesh.layout import AXES
from meshpar.mesh.varying import Axes
from meshpar.sharding.resolve import Placement

Traffic = dict[Axes, Fraction]
"""Axes in the order of the mesh -> bytes that a device sends over them in one call of a program."""

COLLECTIVES = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
    "ppermute": "collective_permute",
}


@dataclass(frozen=True)
class Collective:
    """One collective of a traced program.

    Args:
      kind: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `ragged_all_to_all` or `collective_permute`.
      axes: the mesh axes that its groups span, without those of size 1, in the order of the mesh.
      full_bytes: S, the whole buffer of a group: the output of an all-gather, the input of a reduce-scatter.
      group_size: n, the number of devices of a group.
      times: how often one call of the program runs it.
      senders: the fraction of the devices that send; below 1 only for a permute.
      loop: the number of the innermost loop that runs it, see `walk.Visit`; 0 outside of loops.
    """

    kind: str
    axes: Axes
    full_bytes: int
    group_size: int
    times: Fraction = Fraction(1)
    senders: Fraction = Fraction(1)
    loop: int = field(default=0, compare=False)

    @property
    def sent_bytes(self) -> Fraction:
        """Bytes that a device sends in one run; for a permute the mean over all devices, some of which send nothing.

        Communication: (n-1)/n S; 2(n-1)/n S for an all-reduce; S for each sender of a permute.
        """
        if self.kind == "collective_permute":
            return self.senders * self.full_bytes
        passes = 2 if self.kind == "all_reduce" else 1
        return Fraction(passes * (self.group_size - 1) * self.full_bytes, self.group_size)


def traced_collectives(program: ClosedJaxpr, float_bytes: int = 1) -> list[Collective]:
    """The collectives of a traced program, in its order.

    Args:
      program: the result of `jax.make_jaxpr`.
      float_bytes: the smallest size of a float that is sent; 4 for XLA:CPU, which widens 16-bit floats.

    Raises:
      ProgramError: a `while` of unknown length contains a collective.

    Examples:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from meshpar.mesh.layout import MeshLayout
      >>> total = lambda x: jax.lax.psum(x, "data")
      >>> mesh = MeshLayout(data=4).abstract()
      >>> summed = jax.shard_map(total, mesh=mesh, in_specs=P("data"), out_specs=P())
      >>> traffic(traced_collectives(jax.make_jaxpr(summed)(jnp.ones(32, jnp.float32))))
      {('data',): Fraction(48, 1)}
    """
    visits = (visit for visit in walk(program) if visit.primitive in COLLECTIVES)
    return [one for visit in visits for one in _collectives(visit, float_bytes)]


def gathers(moves: Iterable[tuple[Placement, Placement]], float_bytes: int = 1) -> list[Collective]:
    """The all-gathers with which GSPMD moves arrays from one placement to another one, sharded over fewer axes."""
    found = []
    for old, new in moves:
        dropped = {axis for axes in old.axes for axis in axes} - {axis for axes in new.axes for axis in axes}
        axes = tuple(axis for axis in AXES if axis in dropped)
        if axes:
            width = max(new.spec.dtype.itemsize, float_bytes)
            group_size = math.prod(new.mesh.shape[axis] for axis in axes)
            found.append(Collective("all_gather", axes, math.prod(new.local_shape) * width, group_size))
    return found


def traffic(found: Iterable[Collective]) -> Traffic:
    """Bytes that a device sends, by axes."""
    sent: Traffic = defaultdict(Fraction)
    for one in found:
        sent[one.axes] += one.times * one.sent_bytes
    return {axes: num_bytes for axes, num_bytes in sent.items() if num_bytes}


def _collectives(visit: Visit, float_bytes: int) -> Iterator[Collective]:
    """A collective for each operand; none if all axes have size 1."""
    params = visit.equation.params
    sizes = visit.axis_sizes
    names = params["axes"] if "axes" in params else params["axis_name"]
    names = (names,) if isinstance(names, str) else names
    groups = params.get("axis_index_groups")
    group_size = len(groups[0]) if groups else math.prod(sizes[axis] for axis in names)
    kind = COLLECTIVES[visit.primitive]
    spanned = names
    senders = Fraction(1)
    if kind == "collective_permute":  # it spans the axes along which any source differs from its target
        pairs = np.array(params["perm"], int).reshape(-1, 2)
        indices = np.unravel_index(pairs, [sizes[axis] for axis in names])
        spanned = [axis for axis, index in zip(names, indices, strict=True) if (index[:, 0] != index[:, 1]).any()]
        senders = Fraction(int((pairs[:, 0] != pairs[:, 1]).sum()), group_size)
    axes = tuple(axis for axis in AXES if axis in spanned and sizes[axis] > 1)
    if not axes:
        return
    if visit.times is None:
        raise ProgramError(f"{kind} over {', '.join(axes)}: in a while loop, which may run any number of times")
    operands = visit.equation.invars
    if kind == "ragged_all_to_all":
        # The operands are the sent rows, the received rows, sizes and offsets. If all devices get equally many rows,
        # they fill the smaller one of the two buffers.
        operands = [min(operands[:2], key=lambda operand: operand.aval.size)]
    for operand in operands:
        dtype = operand.aval.dtype
        width = max(dtype.itemsize, float_bytes) if jnp.issubdtype(dtype, jnp.floating) else dtype.itemsize
        num_bytes = operand.aval.size * width
        full = num_bytes * group_size if kind == "all_gather" else num_bytes
        yield Collective(kind, axes, full, group_size, visit.times, senders, visit.loops[-1] if visit.loops else 0)
