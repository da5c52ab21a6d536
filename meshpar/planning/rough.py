"""The rough work of a layout, without a trace of its own: it says which layouts are worth one.

Probes are scaled instead: traces of the step on one device, and on two along each axis that carries activations. What
is sent there grows with the tokens of a device, and over a ring with the number of hops. Gathers of weights and
reductions of gradients are those of ZeRO's stages.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from meshpar.cost.touched import Touch
from meshpar.cost.traced import Collective
from meshpar.planning.estimate import Operations, Work
from meshpar.planning.space import Layout

ACTIVATION_AXES = ("expert", "context", "tensor")
COPIES = 2
"""How often a pipeline holds its sums and activations: branches of its conditionals copy them, see `cost.live`."""
_IDLE: Mapping[str, float] = {"1f1b": 1.0, "interleaved": 1 / 2, "zb_h1": 1 / 3, "zbv": 1 / 12}
"""Schedule -> its idle time as a share of that of 1F1B, which is (stages - 1) / microbatches of its work."""


@dataclass(frozen=True)
class Step:
    """The probe of a remat policy, on one device.

    Args:
      computes: operations of the step.
      bytes_per_token: what it holds, without gradients.
    """

    computes: Operations
    bytes_per_token: float


@dataclass(frozen=True)
class Probes:
    """What the probes of a run say.

    Args:
      tokens: of a batch.
      steps: remat -> the step on one device.
      sent: axis -> the collectives over it, on two devices; None where GSPMD decides what is sent.
      stored: bytes of the parameters.
      gathered: bytes of the parameters in the dtype that the step computes with.
      summed: bytes of the gradients.
      optimizer: bytes of the optimizer's state.
      in_layers: the share of the parameters that a pipeline divides.
      num_layers: of the model; 0 if a pipeline cannot divide it.
    """

    tokens: int
    steps: Mapping[str | None, Step]
    sent: Mapping[str, list[Collective]] | None
    stored: int
    gathered: int
    summed: int
    optimizer: int
    in_layers: float
    num_layers: int

    def states_bytes(self, layout: Layout) -> int:
        """Bytes of parameters and optimizer state on a device."""
        fsdp = layout.size("fsdp")
        stored = self.stored // (fsdp if layout.sharding in ("zero2", "fsdp") else 1)
        return round((stored + self.optimizer // fsdp) * self._share(layout))

    def step_bytes(self, layout: Layout) -> int:
        """Bytes that a step holds beside them: activations, gradients, gathered parameters."""
        share = self._share(layout)
        in_layers = layout.sharding == "fsdp" or (layout.sharding == "zero2" and layout.num_microbatches == 1)
        held = self._tokens_at_once(layout) * self.steps[layout.remat].bytes_per_token / layout.size("tensor")
        held += self.summed * share / (layout.size("fsdp") if in_layers else 1)
        held *= COPIES if layout.schedule else 1
        held += 0 if layout.sharding == "fsdp" else self.gathered * share
        return round(held)

    def work(self, layout: Layout) -> Work:
        """The rough work of a layout."""
        shares = layout.batch_shards * layout.size("context") * layout.size("tensor")
        stages = layout.size("pipe")
        alone = self.steps[layout.remat].computes
        return Work(
            mesh=layout.abstract_mesh,
            computes=_shared(alone, shares, layout.num_microbatches, self._equal_stages(stages)),
            beside=list(self._weights(layout)),
            waits=list(self._activations(layout)),
            idle=1 + _IDLE.get(layout.schedule, 0.0) * (stages - 1) / layout.num_microbatches,
            states_bytes=self.states_bytes(layout),
            step_bytes=self.step_bytes(layout),
        )

    def _tokens_at_once(self, layout: Layout) -> float:
        """Tokens of a device in a microbatch."""
        return self.tokens / layout.batch_shards / layout.size("context") / layout.num_microbatches

    def _equal_stages(self, num_stages: int) -> float:
        """How many stages with as many layers as the longest one the model has."""
        return self.num_layers / math.ceil(self.num_layers / num_stages) if num_stages > 1 else 1.0

    def _share(self, layout: Layout) -> float:
        """The share of the parameters that a device has, if `fsdp` does not divide them."""
        return (self.in_layers / layout.size("pipe") + 1 - self.in_layers) / layout.size("tensor")

    def _weights(self, layout: Layout) -> Iterator[Collective]:
        """The gathers of parameters and the reductions of gradients."""
        gathered = round(self.gathered * self._share(layout))
        summed = round(self.summed * self._share(layout))
        fsdp = layout.size("fsdp")
        if fsdp > 1:
            in_layers = layout.sharding == "fsdp"
            passes = Fraction(layout.num_microbatches if in_layers else 1)
            yield Collective("all_gather", ("fsdp",), gathered, fsdp, passes * (2 if in_layers else 1))
            yield Collective("reduce_scatter", ("fsdp",), summed, fsdp, passes)
        copied = tuple(axis for axis in ("data", "expert", "context") if layout.size(axis) > 1)
        if copied:
            copies = math.prod(map(layout.size, copied))
            yield Collective("all_reduce", copied, summed // fsdp, copies)

    def _activations(self, layout: Layout) -> Iterator[Collective]:
        """The probes' collectives, for this layout's tokens and sizes."""
        for axis in ACTIVATION_AXES:
            size = layout.size(axis)
            if size == 1:
                continue
            shared = layout.batch_shards * layout.size("context") * layout.num_microbatches
            if axis != "tensor":  # in the probe, a group already shares its tokens
                shared //= size
            passes = layout.num_microbatches / layout.size("pipe")
            assert self.sent is not None, "without them only data and fsdp are planned"
            for one in self.sent[axis]:
                is_ring = one.kind == "collective_permute"
                full_bytes = round(one.full_bytes * (2 / size if is_ring else 1) / shared)
                times = float(one.times) * (size - 1 if is_ring else 1) * passes
                yield Collective(one.kind, one.axes, full_bytes, size, Fraction(times))


@cache
def _shared(alone: Operations, shares: int, passes: int, num_stages: float) -> Operations:
    """What a device does of one device's operations: smaller ones, once for each microbatch."""
    parts = shares * passes
    times = passes / num_stages
    products: dict[int, float] = defaultdict(float)
    for flops, count in alone.products.items():
        products[flops // parts] += count * times
    touched: dict[Touch, float] = defaultdict(float)
    for one, count in alone.touched.items():
        touched[one.divided(parts)] += count * times
    return Operations(products, touched)
