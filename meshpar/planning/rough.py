"""Estimates the work of a layout roughly, without a trace of it, to select the layouts that are traced.

It scales probes: traces of the step on one device, and on two along each axis that carries activations. What
is sent there grows with the tokens of a device, and over a ring with the number of hops. Gathers of weights and
reductions of gradients are those of ZeRO's stages.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import pairwise

from meshpar.cost.flops import ProductSizes
from meshpar.cost.touched import Touch
from meshpar.cost.traced import Axes, Collective
from meshpar.models.contract import LayerStack
from meshpar.parallel.pipeline.get_schedule import KINDS
from meshpar.parallel.pipeline.partition import StagePartition, cut_layers
from meshpar.parallel.pipeline.schedule import Schedule
from meshpar.parallel.strategies import Overlap
from meshpar.planning.estimate import Estimate, Operations, Stages, Work, idle, parts
from meshpar.planning.machine import Machine
from meshpar.planning.space import Layout, variants
from meshpar.planning.stages import balanced, cut_with

ACTIVATION_AXES = ("expert", "context", "tensor")
COPIED = {"data", "expert", "context"}
"""Axes whose devices have copies of parameters, and sum their gradients."""
SCALARS = 3
"""Sums of all devices in a step: the loss, the tokens, and the norm of the gradients."""
PERMUTES = 2
"""Permutes for a message where more than two stages send: a tick's permute carries the messages of some stages."""
CHUNK = 256
"""Rows of a product that a device computes at least."""
_LAYERS = 1
"""The number of the loop over layers, or over the ticks of a pipeline: its collectives hide behind its products."""
WORTH_A_CUT = 0.99
"""A cut that is not the default has a slowest stage of at most this share of the default's."""
SIMULATED = 4
"""The most stages of which a schedule is simulated. More are idle in proportion to (stages - 1) / microbatches."""
ROTATING = 7 / 9
"""The part of a ring's permutes that each hop repeats. By the others, rows change places so that causal attention is
as much work on every device."""


@dataclass(frozen=True)
class Step:
    """The probe of a remat policy, on one device.

    Args:
      computes: operations of the step.
      bytes_per_token: bytes that it holds per token, without gradients.
    """

    computes: Operations
    bytes_per_token: float


@dataclass(frozen=True)
class Divided:
    """The probe of an axis that carries activations, on two devices.

    Args:
      sent: the collectives over the axis.
      computes: operations of both devices over those of one device. Attention in smaller blocks computes fewer scores.
      touched: bytes that both devices read and write over those of one device. Where rows are shared, attention is no
        kernel that keeps its scores on the chip.
      products: the products of a device, where they are others than those of one device alone.
    """

    sent: Sequence[Collective] = ()
    computes: float = 1.0
    touched: float = 1.0
    products: Operations | None = None


@dataclass(frozen=True)
class Ends:
    """What a pipeline has beside layers.

    Args:
      flops: operations of the output projection and the loss, forward and backward.
      bytes_per_token: of a message between stages.
    """

    flops: float = 0.0
    bytes_per_token: float = 0.0


@dataclass(frozen=True)
class Probes:
    """Figures of a few traces of a run, from which the work of any layout is scaled.

    Args:
      tokens: the tokens of a batch.
      steps: remat -> the step on one device.
      divided: axis -> its probe; None where GSPMD decides what is sent.
      stored: bytes of the parameters.
      gathered: bytes of the parameters in the dtype that the step computes with.
      summed: bytes of the gradients.
      optimizer: bytes of the optimizer's state.
      in_layers: the share of the parameters that a pipeline divides.
      num_arrays: the number of parameters in layers, and of others.
      stack: the layers that a pipeline divides; None if it cannot.
      ends: what a pipeline has beside layers.
    """

    tokens: int
    steps: Mapping[str | None, Step]
    divided: Mapping[str, Divided] | None
    stored: int
    gathered: int
    summed: int
    optimizer: int
    in_layers: float
    num_arrays: tuple[int, int]
    stack: LayerStack | None
    ends: Ends

    @property
    def head(self) -> float:
        return self.ends.flops

    @property
    def num_layers(self) -> int:
        return self.stack.num_layers if self.stack else 0

    def states_bytes(self, layout: Layout) -> int:
        """Bytes of parameters and optimizer state on a device."""
        fsdp = layout.size("fsdp")
        stored = self.stored // (fsdp if layout.sharding in ("zero2", "fsdp") else 1)
        return round((stored + self.optimizer // fsdp) * self._share(layout))

    def step_bytes(self, layout: Layout) -> int:
        """Bytes that a step holds beside them: activations, gradients, gathered parameters."""
        share = self._share(layout)
        in_layers = _gathers_by_layer(layout)
        held = self._tokens_at_once(layout) * self.steps[layout.remat].bytes_per_token / layout.size("tensor")
        held += self.summed * share / (layout.size("fsdp") if in_layers else 1)
        if layout.schedule:  # each stage has room for as many layers as the longest
            _, cut = self._cut(layout)
            held *= cut.layers.size / self.num_layers
        held += 0 if layout.sharding == "fsdp" else self.gathered * share
        return round(held)

    def work(self, layout: Layout) -> Work:
        """The rough work of a layout."""
        shares = layout.batch_shards * layout.size("context") * layout.size("tensor")
        activations = list(self._activations(layout))
        beside = [one for one in activations if one.kind == "collective_permute"]
        waits = [one for one in activations if one.kind != "collective_permute"]
        computes = _shared(self._alone(layout), shares, layout.num_microbatches)
        for axis in ACTIVATION_AXES:
            if layout.size(axis) > 1:
                computes = _scaled_apart(computes, self._probe(axis).computes, self._probe(axis).touched)
        stages = None
        if layout.schedule:
            schedule, cut = self._cut(layout)
            share = self.head / self.steps[layout.remat].computes.flops
            longest = cut.layers[0].size / self.num_layers
            computes, ends = _scaled(computes, share + (1 - share) * longest), _scaled(computes, share)
            stages = Stages.of(cut, schedule, ends)
        work = Work(
            mesh=layout.abstract_mesh,
            computes=computes,
            beside=[*beside, *self._weights(layout), *self._messages(layout)],
            waits=waits,
            idle=_idle(layout.schedule, layout.size("pipe"), layout.num_microbatches, layout.remat == "full"),
            states_bytes=self.states_bytes(layout),
            step_bytes=self.step_bytes(layout),
            stages=stages,
            dcn=layout.dcn,
            in_loops={0: 0.0, _LAYERS: 1.0},
        )
        return work if layout.overlap == "none" else work.overlapping()

    def _alone(self, layout: Layout) -> Operations:
        """The operations of one device that would have the whole batch, as devices that share rows compute them."""
        alone = self.steps[layout.remat].computes
        shared = self._probe("context").products if layout.size("context") > 1 else None
        return _as_shared(alone, shared) if shared else alone

    def best(self, layout: Layout, machine: Machine, overlaps: Sequence[Overlap]) -> tuple[Layout, Estimate]:
        """The fastest variant of the layout, see `variants` and `balanced`, and the rough estimate of it."""
        every = [self.balanced(one, machine) for one in variants(layout, machine, overlaps)]
        return min(((one, work.on(machine)) for one, work in every), key=lambda pair: pair[1].order)

    def balanced(
        self, layout: Layout, machine: Machine, most: int | None = None, traced: Work | None = None
    ) -> tuple[Layout, Work]:
        """The layout with the cut with which the slowest stage of its pipeline is as fast as it can be; its rough work.

        It stays as it is where its own cut is about as fast, and where devices share cores, for which the work of all
        stages counts.

        Args:
          most: layers that a stage has at most.
          traced: the work of its traced step, which says what a layer takes; else the rough work does.
        """
        work = traced or self.work(layout)
        if work.stages is None or machine.shares_cores:
            return layout, work
        each = parts(work, machine)
        seconds = [layer.total for layer, _ in each]
        unit = min(seconds)
        end = sum(end.total for _, end in each)
        relative = tuple(round(each / unit, 3) for each in seconds)
        better = _better_cut(*self._cut_of(layout), layout.cut, relative, round(end / unit, 3), most)
        if not better:
            return layout, work
        layout = replace(layout, cut=better)
        return layout, self.work(layout)

    def narrower(self, layout: Layout, machine: Machine, share: float) -> Layout:
        """The layout with another cut, whose longest chunk has at most this share of the layers that it has now.

        It stays as it is if no cut has so few.
        """
        schedule, _ = self._cut(layout)
        most = math.floor(max(layout.cut) * share) * schedule.chunks_per_stage
        if most * layout.size("pipe") < self.num_layers:
            return layout
        return self.balanced(replace(layout, cut=()), machine, most)[0]

    def _probe(self, axis: str) -> Divided:
        assert self.divided is not None, "without the probes only data and fsdp are planned"
        return self.divided[axis]

    def _cut(self, layout: Layout) -> tuple[Schedule, StagePartition]:
        return _partition(*self._cut_of(layout), layout.size("pipe"), layout.cut)

    def _cut_of(self, layout: Layout) -> tuple[str, LayerStack, float]:
        """The schedule's kind, the layers, and the operations of the head over those of a layer."""
        assert self.stack is not None, "a model without layers has no pipeline"
        stack = self.stack._replace(multiple=layout.padded_to) if layout.padded_to else self.stack
        in_layers = self.steps[layout.remat].computes.flops - self.head
        return layout.schedule, stack, self.head / in_layers * stack.num_layers

    def _tokens_at_once(self, layout: Layout) -> float:
        """Tokens of a device in a microbatch."""
        return self.tokens / layout.batch_shards / layout.size("context") / layout.num_microbatches

    def _share(self, layout: Layout) -> float:
        """The share of the parameters that a device has, if `fsdp` does not divide them."""
        return (self.in_layers / layout.size("pipe") + 1 - self.in_layers) / layout.size("tensor")

    def _weights(self, layout: Layout) -> Iterator[Collective]:
        """The gathers of parameters and the reductions of gradients, and the sums of scalars."""
        stacks, others = self.num_arrays
        num_layers = max(1, self.num_layers // layout.size("pipe"))
        yield from self._parameters(layout, self.in_layers / layout.size("pipe"), stacks, num_layers, COPIED)
        yield from self._parameters(layout, 1 - self.in_layers, others, 0, {*COPIED, "pipe"})  # all stages have these
        summing = tuple(axis for axis in layout.mesh if axis != "tensor")
        if summing:
            yield _parts("all_reduce", summing, 4 * SCALARS, math.prod(map(layout.size, summing)), 1, SCALARS)

    def _parameters(
        self, layout: Layout, share: float, num_arrays: int, num_layers: int, copied: Collection[str]
    ) -> Iterator[Collective]:
        """The collectives of a part of the parameters.

        Args:
          share: of all parameters.
          num_layers: the layers of a device, which each array has; 0 if these parameters are in no layer.
          copied: the axes whose devices have copies of them.
        """
        fsdp = layout.size("fsdp")
        gathered = round(self.gathered * share / layout.size("tensor"))
        summed = round(self.summed * share / layout.size("tensor"))
        each = max(1, num_layers)
        if fsdp > 1 and num_arrays:
            again = layout.sharding == "fsdp"  # in each microbatch, and of layers in the backward too
            passes = layout.num_microbatches if again else 1
            parts = num_arrays * (each if _gathers_by_layer(layout) else 1)
            times = passes * (2 if again and num_layers else 1)
            loop = _LAYERS if num_layers and _gathers_by_layer(layout) else 0
            yield _parts("all_gather", ("fsdp",), gathered, fsdp, times, parts, loop)
            yield _parts("reduce_scatter", ("fsdp",), summed, fsdp, passes, num_arrays * each, loop)
        axes = tuple(axis for axis in layout.mesh if axis in copied)
        if axes and num_arrays:
            yield _parts("all_reduce", axes, summed // fsdp, math.prod(map(layout.size, axes)), 1, num_arrays)

    def _messages(self, layout: Layout) -> Iterator[Collective]:
        """The messages between stages: one forward and one backward for each microbatch and chunk."""
        if not layout.schedule:
            return
        schedule, _ = self._cut(layout)
        size = layout.size("pipe")
        virtual = size * schedule.chunks_per_stage
        stages = [schedule.stage_of(one, size) for one in range(virtual)]
        sent = sum(one != following for one, following in pairwise(stages))
        full_bytes = round(self.ends.bytes_per_token * self._tokens_at_once(layout) / layout.size("tensor"))
        permutes = 1 if size == 2 else PERMUTES
        times = Fraction(2 * layout.num_microbatches * schedule.chunks_per_stage * permutes)
        senders = Fraction(sent, virtual * permutes)
        yield Collective("collective_permute", ("pipe",), full_bytes, size, times, senders, _LAYERS)

    def _activations(self, layout: Layout) -> Iterator[Collective]:
        """The probes' collectives, for this layout's tokens and sizes."""
        for axis in ACTIVATION_AXES:
            size = layout.size(axis)
            if size == 1:
                continue
            shared = layout.batch_shards * layout.size("context") * layout.num_microbatches
            if axis != "tensor":  # in the probe, a group already shares its tokens
                shared //= size
            if axis == "context":  # keys and values of a device's heads
                shared *= layout.size("tensor")
            passes = layout.num_microbatches / layout.size("pipe")
            for one in self._probe(axis).sent:
                kind, whole, times = one.kind, one.full_bytes / shared, float(one.times) * passes
                if kind == "collective_permute" and layout.gathers_rows:
                    kind, whole, times = "all_gather", 2 * whole, times * ROTATING
                elif kind == "collective_permute":
                    whole, times = whole * 2 / size, times * (1 + ROTATING * (size - 2))
                yield Collective(kind, one.axes, round(whole), size, Fraction(times), loop=_LAYERS)


def _gathers_by_layer(layout: Layout) -> bool:
    """Whether the parameters of a layer are gathered where it runs, and not all before the first one."""
    return layout.sharding == "fsdp" or (layout.sharding == "zero2" and layout.num_microbatches == 1)


def _parts(kind: str, axes: Axes, full_bytes: int, size: int, times: int, count: int, loop: int = 0) -> Collective:
    """A collective of this many equal parts of a buffer."""
    return Collective(kind, axes, full_bytes // count, size, Fraction(times * count), loop=loop)


@cache
def _partition(
    kind: str, stack: LayerStack, head: float, num_stages: int, cut: tuple[int, ...] = ()
) -> tuple[Schedule, StagePartition]:
    schedule = KINDS[kind](num_microbatches=num_stages, cut=cut or None)
    return schedule, cut_layers(schedule, num_stages, stack.num_layers, head, stack.stacked_layers)


@cache
def _better_cut(
    kind: str,
    stack: LayerStack,
    head: float,
    cut: tuple[int, ...],
    seconds: tuple[float, ...],
    end: float,
    most: int | None,
) -> tuple[int, ...]:
    """The cut whose slowest stage is the fastest; empty if that of the given cut is about as fast.

    Args:
      seconds: of a layer, on each stage.
      end: seconds of the output projection and the loss.
      most: layers that a stage has at most.
    """  # fmt: skip
    schedule, own = _partition(kind, stack, head, len(seconds), cut)
    stages = Stages.of(own, schedule, Operations({}, {}))
    ends = [end if stage == stages.last else 0.0 for stage in range(len(seconds))]
    counts = balanced(stack.num_layers, seconds, ends, schedule.chunks_per_stage, most)
    before, after = (
        max(count * each + end for count, each, end in zip(layers, seconds, ends, strict=True))
        for layers in (stages.layers, counts)
    )
    return cut_with(schedule, counts) if after < WORTH_A_CUT * before else ()


@cache
def _idle(kind: str, num_stages: int, num_microbatches: int, recomputes: bool) -> float:
    """The makespan of a schedule over the work of a stage, see `estimate.idle`; 1 without a schedule."""
    if not kind:
        return 1.0
    stages = min(num_stages, SIMULATED)
    count = max(stages, num_microbatches * stages // num_stages)
    simulated = idle(KINDS[kind](num_microbatches=count), stages, recomputes)
    return 1 + (simulated - 1) * (num_stages - 1) / (stages - 1) * count / num_microbatches


@cache
def _scaled(computes: Operations, share: float) -> Operations:
    return computes * share


@cache
def _scaled_apart(computes: Operations, products: float, touched: float) -> Operations:
    return Operations((computes * products).products, (computes * touched).touched)


@cache
def _as_shared(alone: Operations, shared: Operations) -> Operations:
    """As many operations as one device has alone, in products of the sizes that devices have which share rows."""
    return Operations((shared * (alone.flops / shared.flops)).products, alone.touched)


@cache
def _shared(alone: Operations, shares: int, passes: int) -> Operations:
    """A device's share of the operations of one device: smaller ones, once for each microbatch.

    What one device computes in chunks, as the loss, others compute in fewer chunks of that size.
    """
    parts = shares * passes
    products: dict[ProductSizes, float] = defaultdict(float)
    for product, count in alone.products.items():
        smaller = min(parts, max(1, max(product.rows, product.columns, product.terms) * product.batch // CHUNK))
        products[product.divided(smaller)] += count * passes * smaller / parts
    touched: dict[Touch, float] = defaultdict(float)
    for one, count in alone.touched.items():
        touched[one.divided(parts)] += count * passes
    return Operations(products, touched)
