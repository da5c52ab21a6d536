"""Muon: momentum made orthogonal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from meshpar import config
from meshpar.optim.base import TOKENS, Beta, Descent, Matrix, Positive, map_dims

# Quintic Newton-Schulz coefficients of Keller Jordan, github.com/KellerJordan/Muon.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon(Descent):
    """Momentum made orthogonal, for hidden matrices; Adam for embeddings, the head, norms and biases.

    Hidden is a matrix with neither of the dims `vocab` and `positions`. An update of a hidden matrix has all
    singular values near 1, times `rms * sqrt(max(inputs, outputs))`.

    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon;
        for `rms`, Liu et al. 2025, arXiv:2502.16982.
    Memory: one moment a hidden parameter, two any other.
    Communication: XLA's choice, for the products of a sharded matrix with itself.
    """

    elementwise: ClassVar = False
    kind: Literal["muon"] = "muon"
    momentum: Beta = 0.95
    nesterov: bool = True
    num_iterations: config.Positive = 5
    """Of Newton-Schulz, which makes a matrix orthogonal by products alone."""
    rms: Positive = 0.2
    """Root mean square of an update's elements. Adam's have about 0.2, so one learning rate serves both."""
    b1: Beta = 0.9
    """Adam's, for the other parameters."""
    b2: Beta = 0.95
    """Adam's."""
    eps: Positive = 1e-8
    """Adam's."""

    def direction(self, dims: Any) -> optax.GradientTransformation:
        return optax.partition(
            {"muon": self._orthogonal(dims), "adam": optax.scale_by_adam(self.b1, self.b2, self.eps)},
            map_dims(lambda d: "muon" if _is_hidden(d) else "adam", dims),
        )

    def _orthogonal(self, dims: Any) -> optax.GradientTransformation:
        matrices = map_dims(lambda d: _muon_dims(d) if _is_hidden(d) else optax.MaskedNode(), dims)
        muon = optax.contrib.scale_by_muon(
            NEWTON_SCHULZ, self.num_iterations, self.momentum,
            nesterov=self.nesterov, weight_dimension_numbers=matrices,
        )  # fmt: skip
        scale = optax.stateless(lambda updates, _: jax.tree.map(self._scaled, updates, matrices))
        return optax.chain(_without_coefficients(muon), scale)

    def _scaled(self, update: jax.Array, matrix: optax.contrib.MuonDimensionNumbers) -> jax.Array:
        """Of an m x n matrix with singular values 1, the root mean square is 1 / sqrt(max(m, n))."""
        num_inputs, num_outputs = (math.prod(update.shape[i] for i in dims) for dims in matrix)  # pyright: ignore
        return update * (self.rms * math.sqrt(max(num_inputs, num_outputs)))


def _is_hidden(dims: Sequence[str]) -> bool:
    return bool(Matrix.of(dims).outputs) and not set(dims) & set(TOKENS)


def _muon_dims(dims: Sequence[str]) -> optax.contrib.MuonDimensionNumbers:
    matrix = Matrix.of(dims)
    return optax.contrib.MuonDimensionNumbers(matrix.inputs, matrix.outputs)


def _without_coefficients(muon: optax.GradientTransformation) -> optax.GradientTransformation:
    """Keeps the three constants out of the state: they are like no parameter, and need no checkpoint."""

    def init(params: Any) -> Any:
        return muon.init(params)._replace(ns_coeffs=())  # pyright: ignore

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = muon.update(updates, state._replace(ns_coeffs=jnp.asarray(NEWTON_SCHULZ)), params)
        return updates, state._replace(ns_coeffs=())  # pyright: ignore

    return optax.GradientTransformation(init, update)
