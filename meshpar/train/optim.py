"""Optimizers as frozen strategies: each says in which direction to go, their base how far.

All have one form, `params -= lr * (direction + weight_decay * params)`, with one schedule for all parameters.
They are written for stacked parameters: the update of a leaf [layers, ...] is that of each layer alone. The
names of the dims say which of them stack, and which are the inputs and the outputs of a matrix: `Matrix`.

Gradients are not clipped here, but by the train step, which knows their global norm under every sharding.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pydantic

from meshpar.config import Config
from meshpar.train.schedule import Constant, Schedule

Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, pydantic.Field(ge=0, lt=1)]

STACKING = ("layers", "stage", "experts")
HEADS = (("heads", "head_dim"), ("kv_heads", "head_dim"))
TOKENS = ("vocab", "positions")
# Quintic Newton-Schulz coefficients of Keller Jordan, github.com/KellerJordan/Muon.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
# Adafactor's: a matrix of zeros still moves, and a gradient of zeros divides by something.
SMALLEST_RMS = 1e-3
SMALLEST_SQUARE = 1e-30


@dataclass(frozen=True)
class Matrix:
    """A parameter as a stack of matrices, by the indices of its dims.

    Leading dims named `layers`, `stage` or `experts` stack. Of the others, the last is the output (`head_dim`
    together with its dim of heads), and those before it are the input. Where none are before it, as in a norm
    or a bias, the parameter is a stack of vectors: matrices of one column.

    >>> Matrix.of(("layers", "embed", "heads", "head_dim"))
    Matrix(inputs=(1,), outputs=(2, 3))
    >>> Matrix.of(("layers", "heads", "head_dim"))
    Matrix(inputs=(1, 2), outputs=())
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @classmethod
    def of(cls, dims: Sequence[str]) -> Self:
        start = next((i for i, dim in enumerate(dims) if dim not in STACKING), len(dims))
        split = len(dims) - (2 if tuple(dims[-2:]) in HEADS else 1)
        if split <= start:
            return cls(tuple(range(start, len(dims))), ())
        return cls(tuple(range(start, split)), tuple(range(split, len(dims))))


class _Descent(Config):
    elementwise: ClassVar[bool] = True
    """Whether it updates each element by itself, so that on sharded state it communicates nothing."""
    lr: Positive
    """The peak learning rate."""
    schedule: Schedule = Constant()
    """How the learning rate goes, from the first step to `num_steps`."""
    weight_decay: NonNegative = 0.1
    """Decoupled, times the learning rate; on matrices, embeddings among them, not on norms and biases."""
    clip_norm: Positive | None = 1.0
    """The largest norm of the whole gradient; null for no limit."""

    def build(self, num_steps: int, dims: Any) -> optax.GradientTransformation:
        """The Optax chain: a pure function of gradients, state and parameters, without clipping.

        Args:
          num_steps: length of the run.
          dims: like the parameters, of tuples of names of dims.

        Memory: beside the moments, a step count or two; all counts are of updates, not of skipped steps.

        Raises:
          ConfigError: the schedule does not fit `num_steps`.
        """
        return optax.chain(
            self.direction(dims),
            optax.add_decayed_weights(self.weight_decay, _map(lambda d: bool(Matrix.of(d).outputs), dims)),
            optax.scale_by_learning_rate(self.learning_rate(num_steps)),
        )

    def learning_rate(self, num_steps: int) -> optax.Schedule:
        """Number of updates made -> learning rate, float32[]."""
        return self.schedule.build(self.lr, num_steps)

    @abstractmethod
    def direction(self, dims: Any) -> optax.GradientTransformation:
        """Gradients -> what the learning rate is multiplied with, uphill."""


class AdamW(_Descent):
    """Source: Loshchilov and Hutter 2019, arXiv:1711.05101. Memory: two moments a parameter."""

    kind: Literal["adamw"] = "adamw"
    b1: Beta = 0.9
    """Decay of the mean of gradients."""
    b2: Beta = 0.95
    """Decay of the mean of their squares."""
    eps: Positive = 1e-8

    def direction(self, dims: Any) -> optax.GradientTransformation:
        return optax.scale_by_adam(self.b1, self.b2, self.eps)


class Lion(_Descent):
    """The sign of an average. Source: Chen et al. 2023, arXiv:2302.06675. Memory: one moment a parameter.

    >>> tx = Lion(lr=0.5, weight_decay=0).build(10, {"w": ("embed", "mlp")})
    >>> params = {"w": jnp.ones((1, 2))}
    >>> updates, _ = tx.update({"w": jnp.array([[3.0, -4.0]])}, tx.init(params), params)
    >>> print(updates["w"])
    [[-0.5  0.5]]
    """

    kind: Literal["lion"] = "lion"
    b1: Beta = 0.9
    """Share of the past in the direction."""
    b2: Beta = 0.99
    """Share of the past in the moment."""

    def direction(self, dims: Any) -> optax.GradientTransformation:
        return optax.scale_by_lion(self.b1, self.b2)


class SGD(_Descent):
    """Stochastic gradient descent. Memory: one moment a parameter; none without momentum."""

    kind: Literal["sgd"] = "sgd"
    weight_decay: NonNegative = 0.0
    momentum: Beta = 0.9
    nesterov: bool = False

    def direction(self, dims: Any) -> optax.GradientTransformation:
        return optax.trace(self.momentum, self.nesterov) if self.momentum else optax.identity()


class Muon(_Descent):
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
    num_iterations: Annotated[int, pydantic.Field(gt=0)] = 5
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
            _map(lambda d: "muon" if _is_hidden(d) else "adam", dims),
        )

    def _orthogonal(self, dims: Any) -> optax.GradientTransformation:
        matrices = _map(lambda d: _muon_dims(d) if _is_hidden(d) else optax.MaskedNode(), dims)
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


class Adafactor(_Descent):
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
        matrices = _map(Matrix.of, dims)
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


def _map(fn: Callable[[tuple[str, ...]], Any], dims: Any) -> Any:
    return jax.tree.map(fn, dims, is_leaf=lambda x: isinstance(x, tuple) and not isinstance(x, optax.MaskedNode))


Optimizer = Annotated[AdamW | Lion | SGD | Adafactor | Muon, pydantic.Field(discriminator="kind")]
