"""Adafactor: second moments factored into rows and columns."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meshpar.optim.base import Descent, Matrix, NonNegative, Positive, map_dims

# The paper's constants. The first lets a matrix of zeros change; the second avoids a division by zero.
SMALLEST_RMS = 1e-3
SMALLEST_SQUARE = 1e-30


class Adafactor(Descent):
    """Approximates the second moment of a matrix by the outer product of its row and column means.

    Optax's Adafactor factors the two largest dims. This one factors inputs by outputs, for each layer of a stack.
    Weight decay is scaled by the learning rate, but not by the size of the parameters.

    Source: Shazeer and Stern 2018, arXiv:1804.04235. Memory: m + n for an m x n matrix, n for a vector.
    """

    elementwise: ClassVar = False
    kind: Literal["adafactor"] = "adafactor"
    weight_decay: NonNegative = 0.0
    decay_exponent: Positive = 0.8
    """Update t = 1, 2, ... weights the past moments by 1 - t^-decay_exponent."""
    clip_rms: Positive | None = 1.0
    """Largest root mean square of a matrix's update; null for no limit."""
    relative: bool = True
    """Whether the learning rate is scaled by each matrix's root mean square."""

    def direction(self, dims: Any) -> optax.GradientTransformation:
        matrices = map_dims(Matrix.of, dims)

        def resize(update: jax.Array, param: jax.Array, matrix: Matrix) -> jax.Array:
            if self.clip_rms is not None:
                update = update / jnp.maximum(1.0, _rms(update, matrix) / self.clip_rms)
            return update * jnp.maximum(_rms(param, matrix), SMALLEST_RMS) if self.relative else update

        resized = optax.stateless(lambda updates, params: jax.tree.map(resize, updates, params, matrices))
        return optax.chain(_scale_by_factored_rms(matrices, self.decay_exponent), resized)


class FactoredState(NamedTuple):
    """Means of squared gradients: `rows` over the outputs of a matrix, `columns` over its inputs.

    A vector has no outputs: its `rows` are the squares themselves.
    """

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
        weight = num_updates.astype(jnp.float32) ** -exponent

        def mix(old: jax.Array, new: jax.Array) -> jax.Array:
            return old + weight.astype(old.dtype) * (new - old)

        rows, columns = jax.tree.map(mix, (state.rows, state.columns), moments(grads))
        scaled = jax.tree.map(divide, grads, rows, columns, matrices)
        return scaled, FactoredState(num_updates, rows, columns)

    def divide(grad: jax.Array, rows: jax.Array, columns: jax.Array, matrix: Matrix) -> jax.Array:
        """`g[i, j] / sqrt(rows[i] * columns[j] / mean(rows))`, with two roots because the product may underflow."""
        rows = jnp.expand_dims(rows, matrix.outputs)
        share = rows / rows.mean(matrix.inputs, keepdims=True)
        return grad * jax.lax.rsqrt(share) * jax.lax.rsqrt(jnp.expand_dims(columns, matrix.inputs))

    return optax.GradientTransformation(init, update)  # pyright: ignore


def _rms(x: jax.Array, matrix: Matrix) -> jax.Array:
    return jnp.sqrt(jnp.square(x).mean(matrix.inputs + matrix.outputs, keepdims=True))
