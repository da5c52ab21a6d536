"""Adafactor: second moments as outer products."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meshpar.optim.base import Descent, Matrix, NonNegative, Positive, map_dims

# Adafactor's: a matrix of zeros still moves, and a gradient of zeros divides by something.
SMALLEST_RMS = 1e-3
SMALLEST_SQUARE = 1e-30


class Adafactor(Descent):
    """The second moment of a matrix as an outer product of its rows' and its columns'.

    Unlike Optax's, which factors the two largest dims, it factors inputs by outputs, and each layer apart.
    Weight decay is times the learning rate, but not times the parameters' size.

    Source: Shazeer and Stern 2018, arXiv:1804.04235. Memory: m + n for an m x n matrix, n for a vector.
    """

    elementwise: ClassVar = False
    kind: Literal["adafactor"] = "adafactor"
    weight_decay: NonNegative = 0.0
    decay_exponent: Positive = 0.8
    """At update t = 1, 2, .. the moments keep 1 - t^-decay_exponent of the past."""
    clip_rms: Positive | None = 1.0
    """The largest root mean square of an update of one matrix; null for no limit."""
    relative: bool = True
    """Whether the learning rate is a fraction of the root mean square of each matrix."""

    def direction(self, dims: Any) -> optax.GradientTransformation:
        matrices = map_dims(Matrix.of, dims)
        sized = optax.stateless(lambda updates, params: jax.tree.map(self._sized, updates, params, matrices))
        return optax.chain(_scale_by_factored_rms(matrices, self.decay_exponent), sized)

    def _sized(self, update: jax.Array, param: jax.Array, matrix: Matrix) -> jax.Array:
        if self.clip_rms is not None:
            update = update / jnp.maximum(1.0, _rms(update, matrix) / self.clip_rms)
        return update * jnp.maximum(_rms(param, matrix), SMALLEST_RMS) if self.relative else update


class FactoredState(NamedTuple):
    """Means of squared gradients: over the outputs (a vector has none: its own), and over the inputs."""

    num_updates: jax.Array
    rows: Any
    columns: Any


def _scale_by_factored_rms(matrices: Any, exponent: float) -> optax.GradientTransformation:
    def moments(grads: Any) -> tuple[Any, Any]:
        squares = jax.tree.map(lambda g: jnp.square(g) + SMALLEST_SQUARE, grads)
        rows = jax.tree.map(lambda s, m: s.mean(m.outputs), squares, matrices)
        return rows, jax.tree.map(lambda s, m: s.mean(m.inputs), squares, matrices)

    def init(params: Any) -> FactoredState:
        return FactoredState(jnp.int32(0), *jax.tree.map(jnp.zeros_like, moments(params)))

    def update(grads: Any, state: FactoredState, params: Any = None) -> tuple[Any, FactoredState]:
        num_updates = state.num_updates + 1
        fresh = num_updates.astype(jnp.float32) ** -exponent
        mix = lambda old, new: old + fresh.astype(old.dtype) * (new - old)
        rows, columns = jax.tree.map(mix, (state.rows, state.columns), moments(grads))
        scaled = jax.tree.map(_over_rms, grads, rows, columns, matrices)
        return scaled, FactoredState(num_updates, rows, columns)

    return optax.GradientTransformation(init, update)  # pyright: ignore


def _over_rms(grad: jax.Array, rows: jax.Array, columns: jax.Array, matrix: Matrix) -> jax.Array:
    """`g[i, j] / sqrt(rows[i] * columns[j] / mean(rows))`: two roots, for the product may underflow."""
    rows = jnp.expand_dims(rows, matrix.outputs)
    share = rows / rows.mean(matrix.inputs, keepdims=True)
    return grad * jax.lax.rsqrt(share) * jax.lax.rsqrt(jnp.expand_dims(columns, matrix.inputs))


def _rms(x: jax.Array, matrix: Matrix) -> jax.Array:
    return jnp.sqrt(jnp.square(x).mean(matrix.inputs + matrix.outputs, keepdims=True))
