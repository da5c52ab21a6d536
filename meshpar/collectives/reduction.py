"""The config of gradient reduction: formats inside and across slices, the algorithm, the bucket size."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import pydantic
from jax import lax

from meshpar.collectives import operations
from meshpar.collectives.compression import Blocks, Compression, State
from meshpar.collectives.operations import Choice, cut, join
from meshpar.collectives.powersgd import PowerSGD
from meshpar.collectives.quantize import Float8, Int8, OneBit
from meshpar.config import Coerced, Config, default
from meshpar.mesh.varying import Axes, invariant
from meshpar.tree import parse_bytes


class Exact(Config):
    """Sends gradients in the dtype in which they are summed."""

    shorthand: ClassVar = "kind"
    kind: Literal["exact"] = "exact"


class Bfloat16(Config):
    """Sends and sums gradients in bfloat16."""

    shorthand: ClassVar = "kind"
    kind: Literal["bf16"] = "bf16"


Within = Annotated[Exact | Bfloat16 | Int8 | Float8, pydantic.Field(discriminator="kind")]
Across = Annotated[Exact | Bfloat16 | Int8 | Float8 | OneBit | PowerSGD, pydantic.Field(discriminator="kind")]


class Reduce(Config):
    """How gradients are summed over devices, in the manual lowering.

    `within` is the format of reduce-scatters over the axes that shard a parameter's storage, and of sums over copies of
    the parameter inside a slice. `across` is the format of sums over copies in other slices. If no axis of the mesh
    spans slices (`mesh.dcn`), `across` applies to all copies.
    """

    within: Coerced[Within, str | dict[str, Any]] = default(Exact())
    """Format in which gradients are reduce-scattered."""
    across: Coerced[Across, str | dict[str, Any]] = default(Exact())
    """Format in which gradients are all-reduced."""
    algorithm: Choice = "auto"
    """Algorithm of the collectives; `auto` selects the fastest on these links."""
    bucket_bytes: str | int = "64MiB"
    """Size of the buckets into which gradients are fused, in the order of the backward."""

    @pydantic.field_validator("bucket_bytes")
    @classmethod
    def _check_bucket_bytes(cls, size: str | int) -> str | int:
        if parse_bytes(size) < 1:
            raise ValueError("a bucket holds at least one byte")
        return size

    @pydantic.field_validator("within")
    @classmethod
    def _check_within(cls, within: Within) -> Within:
        if isinstance(within, Blocks) and within.error_feedback:
            raise ValueError("within has no error feedback: a layer's backward pass carries no state; use it in across")
        if isinstance(within, Blocks) and within.rounding != "nearest":
            raise ValueError("within rounds to nearest: a layer's backward pass draws no random numbers")
        return within

    @property
    def rounds(self) -> bool:
        """Whether the sums differ from those of one device."""
        return not (isinstance(self.within, Exact) and isinstance(self.across, Exact))

    @property
    def fuses(self) -> bool:
        """Whether gradients are fused into buckets; PowerSGD needs each as a matrix."""
        return not isinstance(self.across, PowerSGD)

    def bucket_size(self, width: int) -> int:
        """The number of elements of a bucket, for elements of `width` bytes."""
        return max(1, int(parse_bytes(self.bucket_bytes)) // width)

    def state(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shapes of the arrays of the state, by name, for a gradient of `shape`."""
        return self.across.state(shape) if isinstance(self.across, Compression) else {}

    def scatter(self, x: jax.Array, axes: Axes, dim: int) -> jax.Array:
        """This rank's part, along `dim`, of the sum over storage axes."""
        if isinstance(self.within, Blocks):
            front = jnp.moveaxis(x, dim, 0)
            return jnp.moveaxis(self.within.reduce_scatter(front, axes, algorithm=self.algorithm), 0, dim)
        part = operations.reduce_scatter(_as(self.within, x), axes, dim=dim, algorithm=self.algorithm)
        return part.astype(x.dtype)

    def sum(
        self, x: jax.Array, inside: Axes, slow: Axes, state: State, key: jax.Array | None
    ) -> tuple[jax.Array, State]:
        """The sum over copies inside a slice and in other slices, and the state for the next step.

        Args:
          x: a bucket, float[m]; or a gradient, if gradients are not fused.
          inside: axes of the copies inside a slice.
          slow: axes of the copies in other slices.
          state: the arrays of `state` from the last step; empty if there are none.

        Communication: a reduce-scatter and an all-gather of x inside a slice, and an all-reduce of this rank's part
          across slices; without fusing, or without copies inside, an all-reduce of x over all axes.
        """
        if not self.fuses or not inside:
            return self._across(x, inside + slow, state, key)
        rank = lax.axis_index(inside)
        size = lax.axis_size(inside)
        part = self.scatter(cut(x, size), inside, 0)[0]
        own = {name: cut(array, size)[rank] for name, array in state.items()}
        if slow:
            part, own = self._across(part, slow, own, key)
        if isinstance(self.within, Blocks):
            whole = self.within.all_gather(part, inside, algorithm=self.algorithm)
        else:
            whole = operations.all_gather(_as(self.within, part), inside, algorithm=self.algorithm).astype(part.dtype)
        state = {name: join(jnp.zeros((size, *a.shape)).at[rank].set(a), x.shape) for name, a in own.items()}
        return invariant(join(whole, x.shape), inside), state

    def _across(self, x: jax.Array, axes: Axes, state: State, key: jax.Array | None) -> tuple[jax.Array, State]:
        if isinstance(self.across, Compression):
            return self.across.all_reduce(x, axes, state, key=key, algorithm=self.algorithm)
        return operations.all_reduce(_as(self.across, x), axes, algorithm=self.algorithm).astype(x.dtype), {}


def _as(kind: Exact | Bfloat16 | Compression, x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16) if isinstance(kind, Bfloat16) else x
