"""The closed form of memory: what a device holds of parameters, gradients and optimizer state in a step.

ZeRO's accounting, by stage, with what it leaves out: parameters that are gathered for a while, and the gradient of a
layer before it is scattered. Activations are not in it.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from meshpar.parallel.traffic import Widths
from meshpar.sharding.constrain import Lowering
from meshpar.sharding.resolve import Placement

LAYERS_AT_ONCE = 2
"""ZeRO-3 holds the layer that is computed, and the next, which is gathered meanwhile."""


@dataclass(frozen=True)
class ModelStates:
    """Bytes on one device.

    Args:
      parameters: as they are stored.
      gathered: beside these, as the step computes with them: whole, or in another dtype.
      gradients: when most is held: of a microbatch, and beside them under accumulation the sums.
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
    how: Lowering,
    widths: Widths,
) -> ModelStates:
    """What the manual lowering holds at its most, on the devices for which it gathers and reduces.

    Args:
      sharded: the parameters, as sharded as the rules can make them.
      stored: the same as they are stored.
      widths: bytes of an element, in storage and in computation.
    """
    sharded = list(sharded)
    return ModelStates(
        parameters=sum(placement.local_bytes for placement in stored),
        gathered=sum(_gathered(placement, how, widths) for placement in sharded),
        gradients=sum(_gradients(placement, how, widths) for placement in sharded),
        optimizer=sum(placement.local_bytes for placement in optimizer),
    )


def _gathered(placement: Placement, how: Lowering, widths: Widths) -> int:
    stage = how.rules.zero_stage if _storage(placement, how) else 0
    whole = _whole_size(placement, how) * widths.compute
    if stage == 3:
        return whole * min(LAYERS_AT_ONCE, num_layers(placement)) // num_layers(placement)
    return whole if stage == 2 or widths.compute != widths.params else 0


def _gradients(placement: Placement, how: Lowering, widths: Widths) -> int:
    whole = _whole_size(placement, how)
    if how.gathers_in_layers and _storage(placement, how):
        shard = math.prod(placement.local_shape) * widths.gradients * (2 if how.num_microbatches > 1 else 1)
        widened = widths.gradients if widths.gradients != widths.compute else 0
        return shard + _layer(placement, whole * (widths.compute + widened))
    # Shards are made, as wide as the optimizer wants them, while others are still whole.
    shard = math.prod(placement.local_shape) * widths.sums if _storage(placement, how) else 0
    if how.num_microbatches > 1:
        return shard + whole * (widths.gradients + widths.compute)
    # What was gathered for the backward is gone when its gradients are widened.
    return shard + max(whole * widths.compute, whole * widths.gradients - _gathered(placement, how, widths))


def _layer(placement: Placement, size: int) -> int:
    return size // num_layers(placement) if num_layers(placement) > 1 else 0


def _storage(placement: Placement, how: Lowering) -> tuple[str, ...]:
    """The axes on which it is only stored, and gathered for use."""
    return tuple(axis for dim in placement.spec.dims for axis in how.storage(dim))


def _whole_size(placement: Placement, how: Lowering) -> int:
    """Elements on a device, once it is gathered."""
    return math.prod(placement.without(_storage(placement, how)).local_shape)


def num_layers(placement: Placement) -> int:
    """How many layers' parameters are stacked in it."""
    dims = placement.spec.dims
    return placement.spec.shape[dims.index("layers")] if "layers" in dims else 1
