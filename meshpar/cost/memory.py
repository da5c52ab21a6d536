"""Computes the memory of parameters, gradients and optimizer state on a device in a step, in closed form.

It follows ZeRO's accounting by stage, and adds parameters while they are gathered and gradients before they are
scattered. Activations are not counted.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass

from meshpar.parallel.context import ParallelContext
from meshpar.sharding.resolve import Placement

LAYERS_AT_ONCE = 2
"""ZeRO-3 holds the layer that is computed, and the next one, which is gathered at the same time."""


@dataclass(frozen=True)
class Widths:
    """Bytes of an element in each of the precisions of a step.

    Args:
      params: bytes of an element of a stored parameter.
      compute: of an activation and of a gathered parameter.
      gradients: of a gradient while it is reduced.
      sums: of the loss and its sums, at least 4.
    """

    params: int
    compute: int
    gradients: int
    sums: int


@dataclass(frozen=True)
class ModelStates:
    """The largest number of bytes on one device, by kind.

    Args:
      parameters: of the stored parameters.
      gathered: of copies for the step's computation: whole parameters, or parameters in another dtype.
      gradients: of whole gradients, of their shards, and of their sums over microbatches.
      optimizer: of the optimizer's state on the device between steps.
      host: of the optimizer's state in the host's memory. The update moves it to the device for a while.
    """

    parameters: int
    gathered: int
    gradients: int
    optimizer: int
    host: int = 0

    @property
    def on_device(self) -> dict[str, int]:
        """The bytes on the device, by kind."""
        return {kind: size for kind, size in asdict(self).items() if kind != "host"}

    @property
    def total(self) -> int:
        return sum(self.on_device.values())


def model_states(
    sharded: Iterable[Placement],
    stored: Iterable[Placement],
    optimizer: Iterable[Placement],
    ctx: ParallelContext,
    widths: Widths,
    frozen: Collection[bool] = (),
) -> ModelStates:
    """The memory of the manual lowering, if the compiler gathers and reduces at the places of the program.

    Args:
      sharded: the parameters, as sharded as the rules can make them.
      stored: the same parameters as they are stored.
      widths: bytes of an element, in storage and in computation.
      frozen: for each parameter, whether it has no gradient; default: all have one.
    """
    placements = list(sharded)
    states = list(optimizer)
    flags = frozen or [False] * len(placements)
    parts = [_Part(placement, ctx, widths, flag) for placement, flag in zip(placements, flags, strict=True)]
    return ModelStates(
        parameters=sum(placement.local_bytes for placement in stored),
        gathered=sum(part.gathered for part in parts),
        gradients=sum(part.gradients for part in parts) + _on_the_way(parts, ctx),
        optimizer=sum(placement.local_bytes for placement in states if placement.memory_kind is None),
        host=sum(placement.local_bytes for placement in states if placement.memory_kind),
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
        """The axes over which the parameter is sharded for storage only, and gathered before use."""
        return tuple(axis for dim in self.placement.spec.dims for axis in self.ctx.storage(dim))

    @property
    def num_layers(self) -> int:
        """The number of layers that the parameter stacks on a device; 0 if it does not belong to the layers."""
        dims = self.placement.spec.dims
        return self.placement.local_shape[dims.index("layers")] if "layers" in dims else 0

    @property
    def shard(self) -> int:
        return math.prod(self.placement.local_shape)

    @property
    def whole(self) -> int:
        """Elements on a device after the parameter is gathered."""
        return math.prod(self.placement.gathered(self.ctx.rules).local_shape)

    @property
    def scattered_in_layer(self) -> bool:
        return self.ctx.gathers_in_layers and bool(self.storage)

    @property
    def gathered(self) -> int:
        stage = self.ctx.rules.zero_stage if self.storage else 0
        computed = self.whole * self.widths.compute
        if stage == 3:
            return computed * min(LAYERS_AT_ONCE, self.num_layers) // max(1, self.num_layers)
        return computed if stage == 2 or self.widths.compute != self.widths.params else 0

    @property
    def gradients(self) -> int:
        summed = self.widths.gradients
        several = self.ctx.num_passes > 1
        if self.is_frozen:
            return 0
        if self.scattered_in_layer:
            return self.shard * summed * (2 if several else 1)
        # Shards in the optimizer's dtype are computed while other gradients are still whole.
        shards = self.shard * self.widths.sums if self.storage else 0
        if several:
            return shards + self.whole * (summed + self.widths.compute)
        # The parameters that were gathered for the backward are freed before their gradients are widened.
        return shards + max(self.whole * self.widths.compute, self.whole * summed - self.gathered)

    @property
    def gradient(self) -> int:
        """Bytes of the whole gradient: as it is computed, and as it is summed if that is another dtype."""
        if self.is_frozen:
            return 0
        return self.whole * sum({self.widths.compute, self.widths.gradients})


def _on_the_way(parts: Sequence[_Part], ctx: ParallelContext) -> int:
    """The largest number of bytes of whole arrays at one time, if gradients are scattered in the layer.

    In the backward of a layer this is its gradient. Outside the layers it is a parameter and its gradient, or a
    parameter that is used at both ends of the model, while the layers are computed.
    """
    inside = [part for part in parts if part.scattered_in_layer and part.num_layers]
    outside = [part for part in parts if part.scattered_in_layer and not part.num_layers]
    layer = sum(part.gradient // part.num_layers for part in inside)
    gathered = sum(part.gathered for part in inside)
    gradient = max((part.gradient for part in outside), default=0)
    if ctx.rules.zero_stage != 3:
        return max(layer, gradient)
    whole = sum(part.whole * part.widths.compute for part in outside)
    return max(layer, whole, whole + gradient - gathered)
