"""How the code that is being traced is lowered: the one context variable of meshpar.

Layers never receive a mesh. They ask here over which axes a dim is sharded, and get none when they run on one
device. `manual` is set inside the step's `shard_map`, where arrays are local shards and communication is
explicit; otherwise, under GSPMD, `constrain` pins activations and XLA communicates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.errors import Problems, ShardingError, nearest
from meshpar.sharding.overlap import Overlap
from meshpar.sharding.resolve import AnyMesh, live
from meshpar.sharding.rules import ACTIVATION_DIMS, AxisRules


@dataclass(frozen=True)
class Lowering:
    """A mesh, the rules on it, and which of the two ways is being traced.

    Args:
      dtype: in which the model computes; None for that of the parameters.
      sums: in which gradients are summed; None for float32 at least.
      num_microbatches: how many parts a batch is computed in.
      reduce: how gradients are reduced, a `collectives.reduction.Reduce`; None leaves it to XLA.
      slow: axes that go across slices.
      overlap: what is communicated in chunks while others are multiplied.
      activation_dims: names that no parameter has: their axes may carry the batch, which another name may stand for.
    """

    mesh: AnyMesh
    rules: AxisRules
    manual: bool
    dtype: Any = None
    sums: Any = None
    num_microbatches: int = 1
    reduce: Any = None
    slow: tuple[str, ...] = ()
    overlap: Overlap = field(default_factory=Overlap)
    activation_dims: tuple[str, ...] = ()

    @property
    def gathers_in_layers(self) -> bool:
        """Whether what is stored in shards is gathered where a layer uses it, and its gradient scattered there."""
        return self.rules.zero_stage == 3 or (self.rules.zero_stage == 2 and self.num_microbatches == 1)

    def overlaps(self, dim: str) -> bool:
        """Whether activations travel in chunks where layers are entered and left whose weights' `dim` is sharded."""
        sequence = self.axes("norm_seq")
        return self.overlap.tensor != "none" and bool(sequence) and sequence == self.axes(dim)

    def axes(self, dim: str) -> tuple[str, ...]:
        """The live axes of an activation's dim."""
        if dim in self.activation_dims:
            return live(self.mesh, self.rules[dim])
        return live(self.mesh, self.rules.activation_axes(dim))

    def shards(self, dim: str) -> int:
        """Into how many an activation's dim is cut."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(dim))

    def storage(self, dim: str) -> tuple[str, ...]:
        """The live axes over which a parameter's dim is stored and must be gathered."""
        return live(self.mesh, self.rules.storage_axes(dim))


_current: ContextVar[Lowering | None] = ContextVar("meshpar_lowering", default=None)


@contextmanager
def lowering(how: Lowering | None) -> Iterator[None]:
    """Traces the body of the `with` as `how` says."""
    token = _current.set(how)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Lowering | None:
    return _current.get()


def manual() -> Lowering | None:
    """The lowering, if this is traced inside the manual `shard_map`."""
    how = _current.get()
    return how if how is not None and how.manual else None


def manual_axes(dim: str) -> tuple[str, ...]:
    """The axes over which the code at hand holds only a shard of `dim`; none when it holds it whole."""
    how = manual()
    return how.axes(dim) if how else ()


def constrain(x: jax.Array, *dims: str) -> jax.Array:
    """Pins an activation to its rules under GSPMD; the identity on one device and in the manual lowering.

    Args:
      x: an activation of any shape.
      dims: a name for each dim.

    Raises:
      ShardingError: a dim is not divisible, where JAX would replicate without a word; or has no rule, or no name.

    >>> constrain(jax.numpy.ones((4, 8)), "batch", "embed").shape
    (4, 8)
    """
    how = _current.get()
    if how is None or how.manual:
        return x
    _check(x.shape, dims, how)
    spec = PartitionSpec(*(how.axes(dim) or None for dim in dims))
    return jax.lax.with_sharding_constraint(x, NamedSharding(how.mesh, spec))  # pyright: ignore


def _check(shape: tuple[int, ...], dims: tuple[str, ...], how: Lowering) -> None:
    problems = Problems()
    if len(shape) != len(dims):
        problems.add(f"{len(shape)} dims {shape}", f"{len(dims)} names", "give a name for each dim")
    for size, dim in zip(shape, dims, strict=False):
        if dim not in how.rules.table and dim not in ACTIVATION_DIMS:
            near = nearest(dim, set(how.rules.table))
            problems.add(dim, "no rule covers it", f"rules.{dim}=[]" + (f", or did you mean {near}?" if near else ""))
        elif size % how.shards(dim):
            shards = " x ".join(f"{a} = {how.mesh.shape[a]}" for a in how.axes(dim))
            problems.add(f"{dim} = {size}", f"is not divisible by {shards}", f"rules.{dim}=[] to leave it whole")
    problems.raise_any(ShardingError, f"constrain{dims}:")
