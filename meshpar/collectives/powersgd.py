"""PowerSGD: the sum's leading directions, by one step of a power iteration that goes on from call to call."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import pydantic

from meshpar.collectives.compress import Compression, floats
from meshpar.collectives.execute import manual_axes
from meshpar.collectives.operations import all_reduce, cut, join
from meshpar.mesh.varying import invariant, varying


class PowerSGD(Compression):
    """The array as a matrix M of about as many rows as columns, sent as two thin ones: `M ~ P Q^T`, P orthonormal.

    Source: Vogels, Karimireddy and Jaggi 2019, arXiv:1905.13727.
    """

    kind: Literal["powersgd"] = "powersgd"
    rank: Annotated[int, pydantic.Field(gt=0)] = 4
    """Columns of P and Q."""
    error_feedback: bool = True

    def state(self, size: int, num_ranks: int) -> dict[str, tuple[int, ...]]:
        rows, columns = _sides(size)
        return {"right": (columns, min(self.rank, columns))} | (
            {"lost": (rows, columns)} if self.error_feedback else {}
        )

    def sent_bytes(self, size: int, num_ranks: int) -> Fraction:
        columns = min(self.rank, *_sides(size))
        parts = (math.ceil(side * columns / num_ranks) for side in _sides(size))
        return Fraction(2 * (num_ranks - 1) * 4 * sum(parts))

    def all_reduce(self, x, axes, state=None, *, key=None, algorithm="auto"):
        axes = manual_axes(axes)
        rows, columns = _sides(x.size)
        state = state or {name: jnp.zeros(shape) for name, shape in self.state(x.size, 1).items()}
        # Before the first step there is no direction to go on with; any that is not orthogonal to M will do.
        right = state["right"]
        right = jnp.where((right == 0).all(), jax.random.normal(jax.random.key(0), right.shape), right)
        matrix = varying(cut(floats(x), rows).reshape(rows, columns), axes) + state.get("lost", 0.0)
        left, _ = jnp.linalg.qr(all_reduce(matrix @ right, axes, algorithm=algorithm))
        mine = matrix.T @ left
        right = all_reduce(mine, axes, algorithm=algorithm)
        total = join(left @ right.T, x.shape).astype(x.dtype)
        lost = {"lost": matrix - left @ mine.T} if self.error_feedback else {}
        return invariant(total, axes), {"right": right} | lost


def _sides(size: int) -> tuple[int, int]:
    rows = math.isqrt(size - 1) + 1
    return rows, math.ceil(size / rows)
