"""PowerSGD: sends a low-rank approximation of a gradient, from a power iteration that advances one step per call."""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp

from meshpar.collectives.compression import Compression, floats
from meshpar.collectives.execute import manual_axes
from meshpar.collectives.operations import all_reduce
from meshpar.config import Positive
from meshpar.mesh.varying import varying


class PowerSGD(Compression):
    """Sends two thin matrices instead of an array: `M ~ P Q^T`, where M is the array as a matrix and P is orthonormal.

    The last dim of the array becomes the columns of M.

    Source: Vogels, Karimireddy and Jaggi 2019, arXiv:1905.13727.
    """

    kind: Literal["powersgd"] = "powersgd"
    rank: Positive = 4
    """The number of columns of P and Q."""
    error_feedback: bool = True

    def state(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        rows, columns = _sides(shape)
        return {"right": (columns, min(self.rank, rows, columns))} | super().state(shape)

    def all_reduce(self, x, axes, state=None, *, key=None, algorithm="auto"):
        axes = manual_axes(axes)
        state = state or {name: jnp.zeros(shape, jnp.float32) for name, shape in self.state(x.shape).items()}
        right = state["right"]
        # The first step has no previous direction; it starts from random ones.
        first = jax.random.normal(jax.random.key(0), right.shape, jnp.float32)
        right = jnp.where((right == 0).all(), first, right)
        corrected = varying(floats(x), axes) + state.get("lost", 0.0)
        matrix = corrected.reshape(_sides(x.shape))
        left, _ = jnp.linalg.qr(all_reduce(matrix @ right, axes, algorithm=algorithm))
        own = matrix.T @ left
        right = all_reduce(own, axes, algorithm=algorithm)
        lost = {"lost": (matrix - left @ own.T).reshape(x.shape)} if self.error_feedback else {}
        return (left @ right.T).reshape(x.shape).astype(x.dtype), {"right": right} | lost


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns; a vector is one row."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1
