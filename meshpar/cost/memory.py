"""The closed form of memory: what a device holds of parameters, gradients and optimizer state in a step.

ZeRO's accounting, by stage, with what it leaves out: parameters that are gathered for a while, and gradients before
they are scattered. Activations are not in it.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass

from meshpar.parallel.context import ParallelContext
from meshpar.sharding.resolve import Placement

LAYERS_AT_ONCE = 2
"""ZeRO-3 holds the layer that is computed, and the next, which is gathered meanwhile."""


@dataclass(frozen=True)
class Widths:
    """Bytes of an element in each of the precisions of a step.

    Args:
      params: of a stored parameter.
      compute: of an activation, and of a parameter as it is gathered.
      gradients: of a gradient as it is reduced.
      sums: of the loss, and of the sums in it: at least 4.
    """

    params: int
    compute: int
    gradients: int
    sums: int


@dataclass(frozen=True)
class ModelStates:
    """Bytes on one device, when most is held.

    Args:
      parameters: as they are stored.
      gathered: beside these, as the step computes with them: whole, or in another dtype.
      gradients: whole, in shards, or both on the way from one to the other; under accumulation the sums, too.
      optimizer: its state.
    """

    parameters: int
    gathered: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def model_states(
    sharded: Iterable[Placement],
    stored: Iterable[Placement],
    optimizer: Iterable[Placement],
    ctx: ParallelContext,
    widths: Widths,
    frozen: Collection[bool] = (),
) -> ModelStates:
    """What the manual lowering holds, on devices for which the compiler gathers and reduces as it is told.

    Args:
      sharded: the parameters, as sharded as the rules can make them.
      stored: the same as they are stored.
      widths: bytes of an element, in storage and in computation.
      frozen: of each parameter, whether it has no gradient; default: all have.
    """
    placements = list(sharded)
    flags = frozen or [False] * len(placements)
    parts = [_Part(placement, ctx, widths, flag) for placement, flag in zip(placements, flags, strict=True)]
    return ModelStates(
        parameters=sum(placement.local_bytes for placement in stored),
        gathered=sum(part.gathered for part in parts),
        gradients=sum(part.gradients for part in parts) + _on_the_way(parts, ctx),
        optimizer=sum(placement.local_bytes for placement in optimizer),
    )


@dataclass(frozen=True)
class _Part:
    """One parameter."""

    placement: Placement
    ctx: ParallelContext
    widths: Widths
    is_frozen: bool

    @property
    def storage(self) -> tuple[str, ...]:
        """The axes on which it is only stored, and gathered for use."""
        return tuple(axis for dim in self.placement.spec.dims for axis in self.ctx.storage(dim))

    @property
    def num_layers(self) -> int:
        """How many layers' parameters are stacked in it on a device; 0 if it is of none."""
        dims = self.placement.spec.dims
        return self.placement.local_shape[dims.index("layers")] if "layers" in dims else 0

    @property
    def shard(self) -> int:
        return math.prod(self.placement.local_shape)

    @property
    def whole(self) -> int:
        """Elements on a device, once it is gathered."""
        return math.prod(self.placement.gathered(self.ctx.rules).local_shape)

    @property
    def scattered_in_layer(self) -> bool:
        return self.ctx.gathers_in_layers and bool(self.storage)

    @property
    def gathered(self) -> int:
        stage, computed = self.ctx.rules.zero_stage if self.storage else 0, self.whole * self.widths.compute
        if stage == 3:
            return computed * min(LAYERS_AT_ONCE, self.num_layers) // max(1, self.num_layers)
        return computed if stage == 2 or self.widths.compute != self.widths.params else 0

    @property
    def gradients(self) -> int:
        summed, several = self.widths.gradients, self.ctx.num_passes > 1
        if self.is_frozen:
            return 0
        if self.scattered_in_layer:
            return self.shard * summed * (2 if several else 1)
        # Shards are made, as wide as the optimizer wants them, while others are still whole.
        shards = self.shard * self.widths.sums if self.storage else 0
        if several:
            return shards + self.whole * (summed + self.widths.compute)
        # What was gathered for the backward is gone when its gradients are widened.
        return shards + max(self.whole * self.widths.compute, self.whole * summed - self.gathered)

    @property
    def gradient(self) -> int:
        """Bytes of the whole of it, as it is computed, and as it is summed, if that is another dtype."""
        compute, summed = self.widths.compute, self.widths.gradients
        return 0 if self.is_frozen else self.whole * (compute + (summed if summed != compute else 0))


def _on_the_way(parts: Sequence[_Part], ctx: ParallelContext) -> int:
    """What is whole for a moment, where gradients are scattered in the layer.

    In a layer's backward its gradient; outside the layers a parameter and its gradient, or, if it is used at both
    ends of the model, the parameter while the layers are computed.
    """
    scattered = [part for part in parts if part.scattered_in_layer]
    inside, outside = [p for p in scattered if p.num_layers], [p for p in scattered if not p.num_layers]
    layer = sum(part.gradient // part.num_layers for part in inside)
    gathered = sum(part.gathered for part in inside)
    kept = sum(part.whole * part.widths.compute for part in outside if ctx.rules.zero_stage == 3)
    gradient = max((part.gradient for part in outside), default=0)
    at_the_ends = kept + gradient - (gathered if ctx.rules.zero_stage == 3 else 0)
    return max(layer, kept, at_the_ends)
