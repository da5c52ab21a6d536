"""The outputs of a model's forward: logits or their projection, and the auxiliary losses and metrics of its layers."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshpar.parallel.context import constrain
from meshpar.parallel.local import zeros_of
from meshpar.parallel.precision import wide

Scalars = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sum:
    """A loss or a metric as a sum over the tokens that count, in place of their mean.

    Args:
      parts: [..., parts], of which it is the sum: one of each device with other tokens.
    """

    parts: Any  # an array; JAX also builds it with placeholders


class Auxiliary(NamedTuple):
    """Scalars that a layer returns in addition to its output. Both dicts may be empty.

    Each is a mean over the tokens of the microbatch, or a `Sum`. Devices that hold different rows may have different
    means; these are averaged, weighted by the number of targets that count. Along all other axes devices must have
    equal means.

    Args:
      losses: name -> float[]. Their sum over layers is added to the objective and reported as a metric.
      metrics: name -> float[]. Their mean over layers is reported. Or name -> float[...], one array for each layer.
    """

    losses: Scalars
    metrics: Scalars

    def share(self, num_layers: int, index: jax.Array) -> Auxiliary:
        """One layer's contribution to the model's `Auxiliary`, the sum over all layers. Numerics: at least float32.

        Args:
          index: int32[], of the layer. A metric that is an array becomes this row of an array [layers, ...].
        """

        def metric(x: Any, num_dims: int = 0) -> Any:
            if isinstance(x, Sum):
                return Sum(metric(x.parts, 1))
            return zeros_of(x, num_layers).at[index].set(x) if x.ndim > num_dims else wide(x) / num_layers

        metrics = {name: metric(x) for name, x in self.metrics.items()}
        return Auxiliary(*jax.tree.map(wide, (self.losses, metrics)))

    def plus(self, other: Auxiliary) -> Auxiliary:
        """The sums of both. A missing name counts as 0."""

        def added(ours: Scalars, theirs: Scalars) -> Scalars:
            both = ours.keys() & theirs.keys()
            return ours | theirs | {name: jax.tree.map(operator.add, ours[name], theirs[name]) for name in both}

        return Auxiliary(added(self.losses, other.losses), added(self.metrics, other.metrics))


class Shares(NamedTuple):
    """What a layer of a stage adds to the totals of a loss.

    Args:
      loss: float[], added to the sum of losses; None if it adds nothing.
      metrics: name -> float[...], added to the sum of this metric.
    """

    loss: jax.Array | None
    metrics: Scalars


def with_auxiliary(made: jax.Array | tuple[jax.Array, Auxiliary]) -> tuple[jax.Array, Auxiliary]:
    """The output of a module, with an empty `Auxiliary` if the module returns none."""
    return made if isinstance(made, tuple) else (made, Auxiliary({}, {}))


@dataclass(frozen=True)
class OutputProjection:
    """Logits that are not computed yet.

    Args:
      hidden: [batch, residual_seq, embed], the output of the last norm.
      head: [embed, vocab].
    """

    hidden: jax.Array
    head: jax.Array

    def logits(self) -> Float[Array, "B S V"]:
        """The logits [batch, seq, vocab]."""
        return logits_of(self.hidden, self.head)


jax.tree_util.register_dataclass(OutputProjection, ["hidden", "head"], [])


def logits_of(hidden_BSD: Float[Array, "B S D"], head_DV: Float[Array, "D V"]) -> Float[Array, "B S V"]:
    """The logits of a device's tokens, for its shard of the vocabulary. Communication: none."""
    return constrain(jnp.einsum("bsd,dv->bsv", hidden_BSD, head_DV), "batch", "seq", "vocab")


@dataclass(frozen=True)
class Outputs:
    """The outputs of a model's forward.

    Args:
      projected: the logits [batch, seq, vocab]; or the projection that computes them.
      losses, metrics: summed over all layers, see `Auxiliary`.
      state: the extra state for the next step; None if the forward does not change it.
    """

    projected: jax.Array | OutputProjection
    losses: Scalars = field(default_factory=dict)
    metrics: Scalars = field(default_factory=dict)
    state: Any = None

    @property
    def logits(self) -> jax.Array:
        """[batch, seq, vocab]."""
        return self.projected.logits() if isinstance(self.projected, OutputProjection) else self.projected

    def sums(self, count: jax.Array) -> Scalars:
        """Losses and metrics as sums over `count` tokens, the form in which `LossSums` holds metrics."""
        return _sums(self.metrics | self.losses, count)

    def plus_losses(self, total: jax.Array, count: jax.Array) -> jax.Array:
        """A sum of losses and the auxiliary losses over `count` tokens.

        Where a program is planned, each of their sums over devices ends in the sum of all: nothing else reads it.
        """
        for x in _sums(self.losses, count).values():
            total += x.astype(total.dtype)
        return total


jax.tree_util.register_dataclass(Outputs, ["projected", "losses", "metrics", "state"], [])


def _sums(means: Scalars, count: jax.Array) -> Scalars:
    def total(x: Any) -> jax.Array:
        return x.parts.sum(-1) if isinstance(x, Sum) else x * count.astype(x.dtype)

    return {name: total(x) for name, x in means.items()}
