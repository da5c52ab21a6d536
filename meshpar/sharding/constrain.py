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
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.errors import ShardingError
from meshpar.sharding.resolve import AnyMesh, live
from meshpar.sharding.rules import AxisRules

Way = Literal["none", "ring", "bidirectional"]


@dataclass(frozen=True)
class Overlap:
    """Which communication is hidden behind the products that it is for, and whether chunks go one way or both.

    Args:
      tensor: that of activations, in layers with sequence parallelism.
      fsdp: the gathers of weights, under ZeRO-3.
    """

    tensor: Way = "none"
    fsdp: Way = "none"


@dataclass(frozen=True)
class Lowering:
    """A mesh, the rules on it, and which of the two ways is being traced.

    Args:
      dtype: in which the model computes; None for that of the parameters.
      sums: in which gradients are summed; None for float32 at least.
      num_microbatches: how many parts a batch is computed in.
      overlap: what is communicated in chunks while others are multiplied.
    """

    mesh: AnyMesh
    rules: AxisRules
    manual: bool
    dtype: Any = None
    sums: Any = None
    num_microbatches: int = 1
    overlap: Overlap = Overlap()

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
        return live(self.mesh, self.rules.activation_axes(dim))

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
      ShardingError: a dim is not divisible, where JAX would replicate without a word.

    >>> constrain(jax.numpy.ones((4, 8)), "batch", "embed").shape
    (4, 8)
    """
    how = _current.get()
    if how is None or how.manual:
        return x
    axes = [how.axes(dim) for dim in dims]
    for size, dim, names in zip(x.shape, dims, axes, strict=True):
        if size % math.prod(how.mesh.shape[a] for a in names):
            raise ShardingError(f"constrain{dims}: {dim} = {size} is not divisible by {' x '.join(names)}")
    spec = PartitionSpec(*(names or None for names in axes))
    return jax.lax.with_sharding_constraint(x, NamedSharding(how.mesh, spec))  # pyright: ignore
