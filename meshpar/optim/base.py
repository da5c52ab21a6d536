"""Optimizers as frozen strategies: each says in which direction to go, their base how far.

All have one form, `params -= lr * (direction + weight_decay * params)`, with one schedule for all parameters.
They are written for stacked parameters: the update of a leaf [layers, ...] is that of each layer alone. The
names of the dims say which of them stack, and which are the inputs and the outputs of a matrix: `Matrix`.

Gradients are not clipped here, but by the train step, which knows their global norm under every sharding.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import jax
import optax
import pydantic

from meshpar.config import Config
from meshpar.optim.freeze import beginning, keeping
from meshpar.optim.schedule import Constant, Schedule

Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, pydantic.Field(ge=0, lt=1)]

STACKING = ("layers", "stage", "experts")
HEADS = (("heads", "head_dim"), ("kv_heads", "head_dim"))
TOKENS = ("vocab", "positions")


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


class Descent(Config):
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
    ema: Annotated[float, pydantic.Field(gt=0, lt=1)] | None = None
    """Decay of an average of the parameters, which evaluations and exports use; 0.999 averages about 1000 updates."""

    def build(self, num_steps: int, dims: Any, frozen: Any = None) -> optax.GradientTransformation:
        """The Optax chain: a pure function of gradients, state and parameters, without clipping.

        Args:
          num_steps: length of the run.
          dims: like the parameters, of tuples of names of dims.
          frozen: like the parameters, see `freeze.frozen_until`; the update wants the keyword `step` then.

        Memory: beside the moments, a step count or two; all counts are of updates, not of skipped steps.

        Raises:
          ConfigError: the schedule does not fit `num_steps`.
        """
        return optax.chain(
            self.direction(dims) if frozen is None else self._thawing(dims, frozen),
            optax.add_decayed_weights(self.weight_decay, map_dims(lambda d: bool(Matrix.of(d).outputs), dims)),
            optax.scale_by_learning_rate(self.learning_rate(num_steps)),
            *([] if frozen is None else [keeping(frozen)]),
        )

    def _thawing(self, dims: Any, frozen: Any) -> optax.GradientTransformation:
        """A direction for each time at which parameters thaw: counts of updates begin there."""

        def only(at: float) -> Any:
            mine = lambda names, until: names if until == at else optax.MaskedNode()
            return jax.tree.map(mine, dims, frozen, is_leaf=_is_dims)

        name = lambda at: {0: "always", math.inf: "never"}.get(at, f"from_{at}")
        times = sorted(set(jax.tree.leaves(frozen)))
        parts: dict[Hashable, optax.GradientTransformation] = {
            name(at): beginning(self.direction(only(at)), at) for at in times
        }
        return optax.partition(parts, jax.tree.map(name, frozen))

    def learning_rate(self, num_steps: int) -> optax.Schedule:
        """Number of updates made -> learning rate, float32[]."""
        return self.schedule.build(self.lr, num_steps)

    @abstractmethod
    def direction(self, dims: Any) -> optax.GradientTransformation:
        """Gradients -> what the learning rate is multiplied with, uphill."""


def map_dims(fn: Callable[[tuple[str, ...]], Any], dims: Any) -> Any:
    return jax.tree.map(fn, dims, is_leaf=_is_dims)


def _is_dims(x: Any) -> bool:
    """A tuple of names; Optax's own mark for a parameter that is another's is a tuple too."""
    return isinstance(x, tuple) and not isinstance(x, optax.MaskedNode)
