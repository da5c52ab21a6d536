"""Reductions that send less than they sum: 8 bits or 1 of each element, or a matrix's leading directions.

All have one interface: `all_reduce(x, axes, state, ...) -> (sum, state)`, where the state is what a rank carries from
one call to the next. With error feedback that is what rounding took away; it is added to the next array before it is
rounded, so that nothing is lost for good, only late.

Source: Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019, arXiv:1901.09847.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import pydantic
from jax import lax

from meshpar.collectives.execute import Axes, manual_axes
from meshpar.collectives.operations import Choice, all_gather, all_to_all, cut, join
from meshpar.config import Config, Positive
from meshpar.errors import ShardingError
from meshpar.mesh.varying import invariant, varying

State = dict[str, jax.Array]
"""What a rank carries to its next call, by name."""


SCALE_BYTES = 4
"""Of the float32 that goes with each block."""


class Compression(Config):
    """Base of the reductions that lose something."""

    shorthand: ClassVar = "kind"

    error_feedback: bool = False
    """Add what one step lost in rounding to the gradient of the next."""

    def state(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shape of each array that a rank carries, all float32, for arrays of a shape."""
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
        """The sum over the axes, and what the next call gets.

        Args:
          x: floats of any shape.
          state: of the last call; None for none, as in the first.
          key: the same on all ranks; for stochastic rounding.

        Numerics: what is not finite makes the sum not finite. Rounding has no gradient: sum gradients with this, and do
          not take them through it.
        Raises:
          ShardingError: x holds integers.
        """
        raise NotImplementedError


class Blocks(Compression):
    """Rounds blocks of elements, each with a float32 scale. A sum is rounded twice: by each rank, and by its owner."""

    block: Annotated[Positive, pydantic.Field(multiple_of=8)] = 256
    """Elements that share a scale."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """`stochastic`: up or down by chance, such that the mean is right."""

    @property
    def code_bytes(self) -> int:
        """Of a block, without its scale."""
        raise NotImplementedError

    def encode(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """f32[..., block] -> (uint8[..., code_bytes], f32[..., 1])."""
        raise NotImplementedError

    def decode(self, code: jax.Array, scale: jax.Array) -> jax.Array:
        raise NotImplementedError

    def all_reduce(self, x, axes, state=None, *, key=None, algorithm="auto"):
        axes = manual_axes(axes)
        keys = _keys(key, axes)
        num_ranks, rank = lax.axis_size(axes), lax.axis_index(axes)
        given = floats(x) + (state or {}).get("lost", 0.0)
        parts = varying(cut(given, num_ranks, multiple=self.block), axes)
        total, lost = self._sum_of_parts(parts, axes, keys[0], algorithm)
        message, lost_of_sum = self._coded(total, keys[1])
        whole = join(self._decoded(all_gather(message[None], axes, algorithm=algorithm)), x.shape)
        # What the sum loses, its owner owes: it goes into the next with the rest.
        lost = join(lost.at[rank].add(lost_of_sum), x.shape)
        return invariant(whole.astype(x.dtype), axes), {"lost": lost} if self.error_feedback else {}

    def reduce_scatter(
        self, x: jax.Array, axes: str | Axes, *, key: jax.Array | None = None, algorithm: Choice = "auto"
    ) -> jax.Array:
        """This rank's part, along the first dim, of the sum: rounded once, by each rank that sends.

        Communication: (n-1)/n of what encodes x.
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
        """The parts of all ranks along the first dim, each rounded by its owner, this rank's own too."""
        axes = manual_axes(axes)
        message, _ = self._coded(self._fill(floats(varying(x, axes)).reshape(1, -1))[0], _keys(key, axes)[0])
        parts = self._decoded(all_gather(message[None], axes, algorithm=algorithm))[:, : x.size]
        return parts.reshape(-1, *x.shape[1:]).astype(x.dtype)

    def _sum_of_parts(
        self, parts: jax.Array, axes: Axes, key: jax.Array | None, algorithm: Choice
    ) -> tuple[jax.Array, jax.Array]:
        """f32[n, part] -> the sum of this rank's, and what rounding took of all."""
        message, lost = self._coded(parts, key)
        return self._decoded(all_to_all(message, axes, algorithm=algorithm)).sum(0), lost

    def _coded(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """f32[..., part] -> one message, uint8[..., bytes]; and what rounding took."""
        code, scale = self.encode(x.reshape(*x.shape[:-1], -1, self.block), key)
        message = jnp.concatenate([code, lax.bitcast_convert_type(scale[..., 0], jnp.uint8)], axis=-1)
        return message.reshape(*x.shape[:-1], -1), x - self.decode(code, scale).reshape(x.shape)

    def _decoded(self, message: jax.Array) -> jax.Array:
        blocks = message.reshape(*message.shape[:-1], -1, self.code_bytes + SCALE_BYTES)
        scale = lax.bitcast_convert_type(blocks[..., self.code_bytes :], jnp.float32)
        return self.decode(blocks[..., : self.code_bytes], scale[..., None]).reshape(*message.shape[:-1], -1)

    def _fill(self, x: jax.Array) -> jax.Array:
        """f32[n, m] -> f32[n, m']: the last dim filled up to blocks."""
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % self.block)))


def floats(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ShardingError(f"{x.dtype}{list(x.shape)} cannot be rounded to fewer bits: a compressed sum is of floats")
    return x.astype(jnp.float32)


def _keys(key: jax.Array | None, axes: Axes) -> Any:
    """One for each rank and rounding: ranks that round alike would add up their errors."""
    return (None, None) if key is None else jax.random.split(jax.random.fold_in(key, lax.axis_index(axes)))
