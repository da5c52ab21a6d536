"""The outputs of a model's forward: logits or their projection, and the auxiliary losses and metrics of its layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from meshpar.parallel.local import zeros_of
from meshpar.parallel.precision import wide
from meshpar.parallel.projection import Projection

Scalars = dict[str, jax.Array]


class Auxiliary(NamedTuple):
    """Scalars that a layer returns in addition to its output. Both dicts may be empty.

    Each is a mean over the tokens of the microbatch. Devices that hold different rows may have different means; these
    are averaged, weighted by the number of targets that count. Along all other axes devices must have equal means.

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

        def metric(x: jax.Array) -> jax.Array:
            return zeros_of(x, num_layers).at[index].set(x) if x.ndim else x / num_layers

        losses = {name: wide(x) for name, x in self.losses.items()}
        return Auxiliary(losses, {name: metric(wide(x)) for name, x in self.metrics.items()})

    def plus(self, other: Auxiliary) -> Auxiliary:
        """The sums of both. A missing name counts as 0."""

        def added(ours: Scalars, theirs: Scalars) -> Scalars:
            both = ours.keys() & theirs.keys()
            return ours | theirs | {name: ours[name] + theirs[name] for name in both}

        return Auxiliary(added(self.losses, other.losses), added(self.metrics, other.metrics))


def with_auxiliary(made: jax.Array | tuple[jax.Array, Auxiliary]) -> tuple[jax.Array, Auxiliary]:
    """The output of a module, with an empty `Auxiliary` if the module returns none."""
    return made if isinstance(made, tuple) else (made, Auxiliary({}, {}))


@dataclass(frozen=True)
class Outputs:
    """The outputs of a model's forward.

    Args:
      projected: the logits [batch, seq, vocab], local shards of the vocabulary; or the projection that computes them.
      losses, metrics: summed over all layers, see `Auxiliary`.
      state: the extra state for the next step; None if the forward does not change it.
    """

    projected: jax.Array | Projection
    losses: Scalars = field(default_factory=dict)
    metrics: Scalars = field(default_factory=dict)
    state: Any = None

    @property
    def logits(self) -> jax.Array:
        """[batch, seq, vocab], local shards of the vocabulary."""
        return self.projected.logits() if isinstance(self.projected, Projection) else self.projected

    def sums(self, count: jax.Array) -> Scalars:
        """Losses and metrics as sums over `count` tokens, the form in which `LossSums` holds metrics."""
        return {name: x * count.astype(x.dtype) for name, x in (self.metrics | self.losses).items()}


jax.tree_util.register_dataclass(Outputs, ["projected", "losses", "metrics", "state"], [])
