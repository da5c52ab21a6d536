"""Optimizers that update some rows of a table, and only the state of these rows.

Shapes: L rows of a shard, M rows to update, D columns on this device, W columns of the table.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import pydantic
from jax import lax

from meshpar.config import Config
from meshpar.mesh.varying import Axes, invariant

Positive = Annotated[float, pydantic.Field(gt=0)]
Beta = Annotated[float, pydantic.Field(ge=0, lt=1)]

State = dict[str, jax.Array]
"""Arrays [L, D], sharded like the table, or [L], replicated on the devices that share a row's columns."""


class RowOptimizer(Config):
    """An optimizer of single rows."""

    lr: Positive
    """The learning rate."""

    @abstractmethod
    def init(self, num_rows: int, width: int, dtype: jax.typing.DTypeLike) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of the state, all zeros at first."""

    @abstractmethod
    def update(
        self, table: jax.Array, state: State, rows: jax.Array, grads: jax.Array, axes: Axes
    ) -> tuple[jax.Array, State]:
        """The table and the state after an update.

        Args:
          table: [L, D].
          rows: int32 [M], unique; indices from L on are ignored.
          grads: [M, D].
          axes: over which the columns are sharded.
        """


class RowAdagrad(RowOptimizer):
    """Adagrad with one sum of squares for each row: `sum += mean(g^2); row -= lr g / (sqrt(sum) + eps)`.

    Source: Duchi et al. 2011; one sum for each row: Mudigere et al. 2021, arXiv:2104.05158. Memory: one number per row.
    Communication: none; where columns are sharded over n devices, an all-reduce of M numbers.
    """

    kind: Literal["row_adagrad"] = "row_adagrad"
    eps: Positive = 1e-8
    """Added to the root of the sum, which divides the update."""

    def init(self, num_rows, width, dtype):
        return {"sum": jax.ShapeDtypeStruct((num_rows,), dtype)}

    def update(self, table, state, rows, grads, axes):
        width = grads.shape[1]
        squares = jnp.square(grads).sum(1)
        if axes:
            squares = lax.psum(squares, axes)
            width *= lax.axis_size(axes)
        own = invariant(rows, axes)  # all devices of the columns have the same rows
        sums = read(state["sum"], own) + squares / width
        step = self.lr * grads / (jnp.sqrt(sums) + self.eps)[:, None]
        return add(table, rows, -step), {"sum": write(state["sum"], own, sums)}


class LazyAdam(RowOptimizer):
    """Adam, where moments decay only in the steps that update their row.

    Each row has its own count of updates, so the first update of a rare row is as large as that of any other row.

    Source: Kingma and Ba 2015, arXiv:1412.6980; TensorFlow's LazyAdam, which counts steps instead. Memory: two moments
    per element, and a count per row.
    """

    kind: Literal["lazy_adam"] = "lazy_adam"
    b1: Beta = 0.9
    """Decay of the mean of the gradients."""
    b2: Beta = 0.999
    """Decay of the mean of the squared gradients."""
    eps: Positive = 1e-8
    """Added to the root of the mean squared gradient, which divides the update."""

    def init(self, num_rows, width, dtype):
        moment = jax.ShapeDtypeStruct((num_rows, width), dtype)
        return {"mean": moment, "square": moment, "count": jax.ShapeDtypeStruct((num_rows,), jnp.int32)}

    def update(self, table, state, rows, grads, axes):
        own = invariant(rows, axes)
        count = read(state["count"], own) + 1
        mean = self.b1 * read(state["mean"], rows) + (1 - self.b1) * grads
        square = self.b2 * read(state["square"], rows) + (1 - self.b2) * jnp.square(grads)
        updates = count.astype(grads.dtype)[:, None]
        corrected = jnp.sqrt(square / (1 - self.b2**updates)) + self.eps
        step = self.lr * mean / (1 - self.b1**updates) / corrected
        new = {
            "mean": write(state["mean"], rows, mean),
            "square": write(state["square"], rows, square),
            "count": write(state["count"], own, count),
        }
        return add(table, rows, -step), new


Optimizer = Annotated[RowAdagrad | LazyAdam, pydantic.Field(discriminator="kind")]


def read(array: jax.Array, rows: jax.Array) -> jax.Array:
    """Some rows; zeros for rows beyond the last."""
    return array.at[rows].get(mode="fill", fill_value=0)


def write(array: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """The array with new values in some rows, which are unique. Rows beyond the last are ignored."""
    return array.at[rows].set(values, mode="drop", unique_indices=True)


def add(array: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """The array with values added to some rows, which are unique. Rows beyond the last are ignored."""
    return array.at[rows].add(values, mode="drop", unique_indices=True)
