"""The base class of all optimizers: it scales the direction that a subclass computes.

Every optimizer computes `params -= lr * (direction + weight_decay * params)`, with one schedule for all parameters.
Parameters may be stacked: the update of a leaf [layers, ...] equals the updates of its layers one by one. `Matrix`
finds from the names of the dims which dims stack, and which are the inputs and outputs of a matrix.

The train step clips gradients, because it computes their global norm under every sharding.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import jax
import optax
import pydantic

from meshpar.config import Config, Section, default
from meshpar.optim.freeze import starting_at
from meshpar.optim.schedule import Constant, Schedule

Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, pydantic.Field(ge=0, lt=1)]

STACKING = ("layers", "stage", "experts")
HEADS = (("heads", "head_dim"), ("kv_heads", "head_dim"))
TOKENS = ("vocab", "positions")


@dataclass(frozen=True)
class Matrix:
    """Describes a parameter as a stack of matrices, by the indices of its dims.

    Leading dims named `layers`, `stage` or `experts` stack. Of the other dims, the last is the output (`head_dim`
    together with its dim of heads), and those before it are the input. If there are none before it, as in a norm
    or a bias, the parameter is a stack of vectors: matrices with one column.

    >>> Matrix.of(("layers", "embed", "heads", "head_dim"))
    Matrix(inputs=(1,), outputs=(2, 3))
    >>> Matrix.of(("layers", "heads", "head_dim"))
    Matrix(inputs=(1, 2), outputs=())
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    is_table: bool = field(default=False, compare=False, repr=False)
    """Whether its rows belong to tokens: an embedding, or the projection of the logits."""

    @classmethod
    def of(cls, dims: Sequence[str] | Matrix) -> Matrix:
        """The matrix of a parameter with these dims, or the one that was found already, see `uses`."""
        if isinstance(dims, Matrix):
            return dims
        is_table = bool({*dims} & {*TOKENS})
        start = next((i for i, dim in enumerate(dims) if dim not in STACKING), len(dims))
        split = len(dims) - (2 if tuple(dims[-2:]) in HEADS else 1)
        if split <= start:
            return cls(tuple(range(start, len(dims))), (), is_table)
        return cls(tuple(range(start, split)), tuple(range(split, len(dims))), is_table)


class Descent(Config):
    """An optimizer.

    A subclass defines `direction` and the fields that it reads.
    """

    elementwise: ClassVar[bool] = True
    """Whether the update of an element depends on no other, so that sharded state needs no communication."""
    lr: Positive
    """The peak learning rate."""
    schedule: Section[Schedule] = default(Constant())
    """The learning rate over the steps, as a fraction of `lr`."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay, scaled by the learning rate, of matrices and embeddings."""
    clip_norm: Positive | None = 1.0
    """Largest global norm of the gradients; null for no limit."""
    ema: Annotated[float, pydantic.Field(gt=0, lt=1)] | None = None
    """Decay of the average of the parameters that evaluations and exports use."""

    def build(self, num_steps: int, dims: Any, frozen: Any = None) -> optax.GradientTransformation:
        """Builds the Optax chain, without clipping.

        Args:
          num_steps: length of the run.
          dims: tree like the parameters; each leaf is a tuple of the names of its dims, or a `Matrix`.
          frozen: for how many steps each parameter is frozen, see `freeze.frozen_until`; a tree like the parameters,
            without those that are never trained. The update then needs the keyword `step`.

        Memory: the moments, and one or two counts of updates; skipped steps do not count.

        Raises:
          ConfigError: the schedule does not fit `num_steps`.
        """
        unscaled = self._unscaled(dims) if frozen is None else [self._partitioned(dims, frozen)]
        return optax.chain(*unscaled, optax.scale_by_learning_rate(self.learning_rate(num_steps)))

    def _unscaled(self, dims: Any) -> list[optax.GradientTransformation]:
        """The direction and weight decay, before the learning rate."""
        is_decayed = map_dims(lambda names: bool(Matrix.of(names).outputs), dims)
        return [self.direction(dims), optax.add_decayed_weights(self.weight_decay, is_decayed)]

    def _partitioned(self, dims: Any, frozen: Any) -> optax.GradientTransformation:
        """Uses one transformation for all parameters that thaw at the same step, whose counts start at that step."""

        def transform(first: float) -> optax.GradientTransformation:
            group = jax.tree.map(
                lambda names, until: names if until == first else optax.MaskedNode(), dims, frozen, is_leaf=_is_dims
            )
            return starting_at(int(first), optax.chain(*self._unscaled(group)))

        groups = {f"from_{int(first)}": transform(first) for first in sorted(set(jax.tree.leaves(frozen)))}
        return optax.partition(groups, jax.tree.map(lambda first: f"from_{int(first)}", frozen))  # pyright: ignore

    def describe(self, dims: Sequence[str] | Matrix) -> str:
        """What updates a parameter with these dims, as text."""
        decays = self.weight_decay and Matrix.of(dims).outputs
        return (
            f"{self._rule(Matrix.of(dims))}, {f'weight decay {self.weight_decay:g}' if decays else 'no weight decay'}"
        )

    def _rule(self, matrix: Matrix) -> str:
        return getattr(self, "kind", type(self).__name__)

    def learning_rate(self, num_steps: int) -> optax.Schedule:
        """Returns a function: number of updates made -> learning rate, float32[]."""
        return self.schedule.build(self.lr, num_steps)

    @abstractmethod
    def direction(self, dims: Any) -> optax.GradientTransformation:
        """Returns a transformation: gradients -> the uphill direction, which the learning rate scales."""


def map_dims(fn: Callable[[Any], Any], dims: Any) -> Any:
    """Maps a function over a tree of tuples of names, or of `Matrix`."""
    return jax.tree.map(fn, dims, is_leaf=_is_dims)


def _is_dims(x: Any) -> bool:
    """Whether this is a tuple of names. `optax.MaskedNode` is a tuple too, but stands for a parameter elsewhere."""
    return isinstance(x, tuple) and not isinstance(x, optax.MaskedNode)
