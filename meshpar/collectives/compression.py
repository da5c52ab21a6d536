"""Compressed reductions: they send 8 bits or 1 bit of each element, or a matrix's leading directions.

All have one interface: `all_reduce(x, axes, state, ...) -> (sum, state)`. A rank passes the state from one call to the
next. With error feedback it holds the rounding error, which is added to the next array before that array is rounded. So
no part of a gradient is lost; some arrives later.

Source: Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019, arXiv:1901.09847.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import pydantic
from jax import lax

from meshpar.collectives.execute import manual_axes
from meshpar.collectives.operations import Choice, all_gather, all_to_all, cut, join
from meshpar.config import Config, Positive
from meshpar.errors import ShardingError
from meshpar.mesh.varying import Axes, invariant, varying

State = dict[str, jax.Array]
"""The arrays that a rank passes to its next call, by name."""

SCALE_BYTES = 4
"""Bytes of the float32 scale of a block."""


class Compression(Config):
    """Base of the lossy reductions."""

    shorthand: ClassVar = "kind"

    error_feedback: bool = False
    """Whether the rounding error of a step is added to the next gradient."""

    def state(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shapes of the float32 arrays of the state, by name, for sums of arrays of `shape`."""
        return {"lost": shape} if self.error_feedback else {}

    def all_reduce(
        self,
        x: jax.Array,
        axes: str | Axes,
        state: State | None = None,
        *,
        key: jax.Array | None = None,
        algorithm: Choice = "auto",
    ) -> tuple[jax.Array, State]:
        """The sum over the axes, and the state for the next call.

        Args:
          x: floats of any shape.
          state: returned by the last call; None in the first.
          key: for stochastic rounding; the same on all ranks.

        Numerics: elements that are not finite make the sum not finite. Rounding has no gradient: use this to sum
          gradients, and do not differentiate it.
        Raises:
          ShardingError: x holds integers.
        """
        raise NotImplementedError


class Blocks(Compression):
    """Rounds blocks of elements, each with a float32 scale.

    A sum is rounded twice: each rank rounds its own part of it, and the owner rounds the total.
    """

    block: Annotated[Positive, pydantic.Field(multiple_of=8)] = 256
    """The number of elements that share a scale."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """`stochastic` rounds up or down at random, so that the mean is exact."""

    @property
    def code_bytes(self) -> int:
        """Bytes of an encoded block, without its scale."""
        return self.block

    def encode(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """f32[..., block] -> (uint8[..., code_bytes], f32[..., 1])."""
        raise NotImplementedError

    def decode(self, code: jax.Array, scale: jax.Array) -> jax.Array:
        raise NotImplementedError

    def all_reduce(self, x, axes, state=None, *, key=None, algorithm="auto"):
        axes = manual_axes(axes)
        keys = _keys(key, axes)
        rank = lax.axis_index(axes)
        corrected = floats(x) + (state or {}).get("lost", 0.0)
        parts = varying(cut(corrected, lax.axis_size(axes), multiple=self.block), axes)
        total, lost = self._sum_of_parts(parts, axes, keys[0], algorithm)
        message, lost_of_sum = self._coded(total, keys[1])
        whole = join(self._decoded(all_gather(message[None], axes, algorithm=algorithm)), x.shape)
        # The owner of a part of the sum also carries that part's rounding error.
        lost = join(lost.at[rank].add(lost_of_sum), x.shape)
        return invariant(whole.astype(x.dtype), axes), {"lost": lost} if self.error_feedback else {}

    def reduce_scatter(
        self, x: jax.Array, axes: str | Axes, *, key: jax.Array | None = None, algorithm: Choice = "auto"
    ) -> jax.Array:
        """This rank's part of the sum along the first dim. Each rank rounds once, before it sends.

        Communication: (n-1)/n of the encoded x.
        """
        axes = manual_axes(axes)
        num_ranks = lax.axis_size(axes)
        if x.shape[0] % num_ranks:
            raise ShardingError(f"{x.dtype}{list(x.shape)}: dim 0 is not divisible by {num_ranks}, the ranks of {axes}")
        shape = (x.shape[0] // num_ranks, *x.shape[1:])
        parts = self._fill(floats(x).reshape(num_ranks, -1))
        total, _ = self._sum_of_parts(varying(parts, axes), axes, _keys(key, axes)[0], algorithm)
        return join(total, shape).astype(x.dtype)

    def all_gather(
        self, x: jax.Array, axes: str | Axes, *, key: jax.Array | None = None, algorithm: Choice = "auto"
    ) -> jax.Array:
        """The parts of all ranks along the first dim, each rounded by its owner; this rank's part is rounded too."""
        axes = manual_axes(axes)
        message, _ = self._coded(self._fill(floats(varying(x, axes)).reshape(1, -1))[0], _keys(key, axes)[0])
        parts = self._decoded(all_gather(message[None], axes, algorithm=algorithm))[:, : x.size]
        return parts.reshape(-1, *x.shape[1:]).astype(x.dtype)

    def _sum_of_parts(
        self, parts: jax.Array, axes: Axes, key: jax.Array | None, algorithm: Choice
    ) -> tuple[jax.Array, jax.Array]:
        """f32[n, part] -> the sum of this rank's part, and the rounding errors of all parts."""
        message, lost = self._coded(parts, key)
        return self._decoded(all_to_all(message, axes, algorithm=algorithm)).sum(0), lost

    def _coded(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """f32[..., part] -> one message, uint8[..., bytes], and the rounding error."""
        code, scale = self.encode(x.reshape(*x.shape[:-1], -1, self.block), key)
        message = jnp.concatenate([code, lax.bitcast_convert_type(scale[..., 0], jnp.uint8)], axis=-1)
        return message.reshape(*x.shape[:-1], -1), x - self.decode(code, scale).reshape(x.shape)

    def _decoded(self, message: jax.Array) -> jax.Array:
        blocks = message.reshape(*message.shape[:-1], -1, self.code_bytes + SCALE_BYTES)
        scale = lax.bitcast_convert_type(blocks[..., self.code_bytes :], jnp.float32)
        return self.decode(blocks[..., : self.code_bytes], scale[..., None]).reshape(*message.shape[:-1], -1)

    def _fill(self, x: jax.Array) -> jax.Array:
        """f32[n, m] -> f32[n, m']: the last dim padded to whole blocks."""
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % self.block)))


def floats(x: jax.Array) -> jax.Array:
    """x as float32; raises ShardingError if it holds integers."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ShardingError(f"{x.dtype}{list(x.shape)} cannot be compressed: a compressed sum needs floats")
    return x.astype(jnp.float32)


def _keys(key: jax.Array | None, axes: Axes) -> Any:
    """A key for each rank and each of its two roundings: if all ranks rounded alike, their errors would add up."""
    return (None, None) if key is None else jax.random.split(jax.random.fold_in(key, lax.axis_index(axes)))
