"""Muon: orthogonalized momentum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from meshpar import config
from meshpar.optim.base import Beta, Descent, Matrix, Positive, map_dims

# Quintic Newton-Schulz coefficients of Keller Jordan, github.com/KellerJordan/Muon.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon(Descent):
    """Orthogonalizes the momentum of hidden matrices; uses Adam for embeddings, the head, norms and biases.

    A matrix is hidden if it has neither the dim `vocab` nor `positions`. All singular values of its update are near
    1, times `rms * sqrt(max(inputs, outputs))`.

    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon;
        for `rms`, Liu et al. 2025, arXiv:2502.16982.
    Memory: one moment for a hidden parameter, two for any other.
    Communication: chosen by XLA, for the products of a sharded matrix with itself.
    """

    elementwise: ClassVar = False
    kind: Literal["muon"] = "muon"
    momentum: Beta = 0.95
    """Decay of the sum of the gradients."""
    nesterov: bool = True
    """Whether the update uses Nesterov's momentum."""
    num_iterations: config.Positive = 5
    """Number of Newton-Schulz iterations, which orthogonalize a matrix by matrix products."""
    rms: Positive = 0.2
    """Root mean square of an update's elements. Adam's is about 0.2, so one learning rate serves both."""
    b1: Beta = 0.9
    """Adam's b1, for the other parameters."""
    b2: Beta = 0.95
    """Adam's b2."""
    eps: Positive = 1e-8
    """Adam's eps."""

    def direction(self, dims: Any) -> optax.GradientTransformation:
        return optax.partition(
            {"muon": self._orthogonal(dims), "adam": optax.scale_by_adam(self.b1, self.b2, self.eps)},
            map_dims(lambda d: "muon" if _is_hidden(d) else "adam", dims),
        )

    def _rule(self, matrix: Matrix) -> str:
        return "muon" if _is_hidden(matrix) else "adam, as muon does for embeddings, the head, norms and biases"

    def _orthogonal(self, dims: Any) -> optax.GradientTransformation:
        def matrix(names: Sequence[str] | Matrix) -> Any:
            if not _is_hidden(names):
                return optax.MaskedNode()
            return optax.contrib.MuonDimensionNumbers(Matrix.of(names).inputs, Matrix.of(names).outputs)

        def scale(update: jax.Array, matrix: optax.contrib.MuonDimensionNumbers) -> jax.Array:
            """The root mean square of an m x n matrix with singular values 1 is 1 / sqrt(max(m, n))."""
            num_inputs, num_outputs = (math.prod(update.shape[i] for i in dims) for dims in matrix)  # pyright: ignore
            return update * (self.rms * math.sqrt(max(num_inputs, num_outputs)))

        matrices = map_dims(matrix, dims)
        muon = optax.contrib.scale_by_muon(
            NEWTON_SCHULZ, self.num_iterations, self.momentum,
            nesterov=self.nesterov, weight_dimension_numbers=matrices,
        )  # fmt: skip
        scaled = optax.stateless(lambda updates, _: jax.tree.map(scale, updates, matrices))
        return optax.chain(_without_coefficients(muon), scaled)


def _is_hidden(dims: Sequence[str] | Matrix) -> bool:
    matrix = Matrix.of(dims)
    return bool(matrix.outputs) and not matrix.is_table


def _without_coefficients(muon: optax.GradientTransformation) -> optax.GradientTransformation:
    """Removes the three constants from the state, because they belong to no parameter and need no checkpoint."""

    def init(params: Any) -> Any:
        return muon.init(params)._replace(ns_coeffs=())  # pyright: ignore

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = muon.update(updates, state._replace(ns_coeffs=jnp.asarray(NEWTON_SCHULZ)), params)
        return updates, state._replace(ns_coeffs=())  # pyright: ignore

    return optax.GradientTransformation(init, update)
