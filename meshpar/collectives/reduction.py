"""How gradients are reduced, declared once: inside a slice, across slices, by which algorithm, in which buckets."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import pydantic
from jax import lax

from meshpar.collectives import operations
from meshpar.collectives.codes import Float8, Int8, OneBit
from meshpar.collectives.compress import Blocks, Compression, State
from meshpar.collectives.operations import Choice, cut, join
from meshpar.collectives.powersgd import PowerSGD
from meshpar.config import Config
from meshpar.mesh.varying import invariant
from meshpar.tree import parse_bytes

Axes = tuple[str, ...]


class Exact(Config):
    """In the dtype in which gradients are summed."""

    shorthand: ClassVar = "kind"
    kind: Literal["exact"] = "exact"


class Bfloat16(Config):
    """In bfloat16: added up in it too."""

    shorthand: ClassVar = "kind"
    kind: Literal["bf16"] = "bf16"


Within = Annotated[Exact | Bfloat16 | Int8 | Float8, pydantic.Field(discriminator="kind")]
Across = Annotated[Exact | Bfloat16 | Int8 | Float8 | OneBit | PowerSGD, pydantic.Field(discriminator="kind")]


class Reduce(Config):
    """How gradients are summed over the devices, in the manual lowering.

    `within` is for the axes over which a parameter is stored in shards, where its gradient is reduce-scattered, and for
    those over which it is copied inside a slice; `across` is for the copies in other slices. Where the mesh says of no
    axis that it goes across slices (`mesh.dcn`), all copies count as across.
    """

    within: Within = Exact()
    """In what a gradient is reduce-scattered: exact, bf16, int8, fp8."""
    across: Across = Exact()
    """In what it is all-reduced: exact, bf16, int8, fp8, onebit, powersgd."""
    algorithm: Choice = "auto"
    """Of the tables; `auto` is the fastest on the links that are here."""
    bucket_bytes: str | int = "64MiB"
    """Gradients are fused into buckets of so many bytes, in the order in which the backward makes them."""

    @pydantic.field_validator("bucket_bytes")
    @classmethod
    def _some(cls, given: str | int) -> str | int:
        if parse_bytes(given) < 1:
            raise ValueError("a bucket holds a byte at least")
        return given

    @pydantic.field_validator("within")
    @classmethod
    def _keeps_nothing(cls, within: Any) -> Any:
        if getattr(within, "error_feedback", False):
            raise ValueError("within keeps no error: a layer's gradient is scattered in its backward; only across does")
        if getattr(within, "rounding", "nearest") != "nearest":
            raise ValueError("within rounds to the nearest: a layer's backward draws no random numbers")
        return within

    @property
    def rounds(self) -> bool:
        """Whether sums are other than those of one device."""
        return not (isinstance(self.within, Exact) and isinstance(self.across, Exact))

    @property
    def fuses(self) -> bool:
        """Whether gradients are put together into buckets; PowerSGD wants each as the matrix that it is."""
        return not isinstance(self.across, PowerSGD)

    def bucket_size(self, width: int) -> int:
        """Elements of a bucket."""
        return max(1, int(parse_bytes(self.bucket_bytes)) // width)

    def state(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shape of each array that a rank carries for a gradient of a shape."""
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
        """The sum over copies inside a slice, and in others, and what the next step gets.

        Args:
          x: a bucket, float[m]; or, if nothing is fused, a gradient.
          state: what the last step left, with `state`'s shapes; empty if there is none.

        Communication: inside a slice a reduce-scatter and an all-gather of x; across slices an all-reduce of this
          rank's part of it. All of it across if nothing is fused or there are no copies inside.
        """
        if not self.fuses or not inside:
            return self._across(x, inside + slow, state, key)
        rank, size = lax.axis_index(inside), lax.axis_size(inside)
        part = self.scatter(cut(x, size), inside, 0)[0]
        lost = {name: cut(kept, size)[rank] for name, kept in state.items()}
        part, lost = self._across(part, slow, lost, key) if slow else (part, lost)
        whole = join(self._gather(part, inside), x.shape)
        owed = {name: join(jnp.zeros((size, *kept.shape)).at[rank].set(kept), x.shape) for name, kept in lost.items()}
        return invariant(whole, inside), owed

    def _across(self, x: jax.Array, axes: Axes, state: State, key: jax.Array | None) -> tuple[jax.Array, State]:
        if isinstance(self.across, Compression):
            return self.across.all_reduce(x, axes, state, key=key, algorithm=self.algorithm)
        return operations.all_reduce(_as(self.across, x), axes, algorithm=self.algorithm).astype(x.dtype), {}

    def _gather(self, part: jax.Array, axes: Axes) -> jax.Array:
        if isinstance(self.within, Blocks):
            return self.within.all_gather(part, axes, algorithm=self.algorithm)
        return operations.all_gather(_as(self.within, part), axes, algorithm=self.algorithm).astype(part.dtype)


def _as(kind: Exact | Bfloat16 | Compression, x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16) if isinstance(kind, Bfloat16) else x
