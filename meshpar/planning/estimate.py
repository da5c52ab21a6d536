"""Estimates the time and the memory of a step on a machine from its trace; nothing is compiled.

    step = products + other operations + the communication that they wait for, by axes
           + the communication that nothing hides, by axes + the idle time of the schedule

A product takes the time of its tiles at the machine's rate, any other operation the time to read and write its
bytes. Activations that a product waits for are exposed. Weights that are gathered and gradients that are reduced, and
permutes, of attention's rings and of a pipeline's messages, may hide behind products of the loop that runs them, where
devices communicate while they compute. What runs outside of loops, such as the reduction of a whole gradient after the
backward, has only the products outside of loops to hide behind.

The trace of a pipeline's step has the products of as many layers as the longest stage has, and of both ends of the
model. So the time of each stage is known, on its own chips. The busiest one decides. The simulation of the schedule
says how long it is idle while others work. Simulated devices share cores: nothing is hidden, and no core is idle.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Self, TypeVar

import jax
from jax.extend.core import ClosedJaxpr

from meshpar.cost.flops import ProductSizes, traced_products
from meshpar.cost.live import peak_bytes
from meshpar.cost.passes import passes
from meshpar.cost.touched import TRANSPOSE, Touch, functions_outside, touched_bytes
from meshpar.cost.traced import Axes, Collective
from meshpar.experiment.prepare import Prepared
from meshpar.inspection.inspect import axes_name
from meshpar.parallel.pipeline.partition import StagePartition
from meshpar.parallel.pipeline.schedule import Schedule
from meshpar.parallel.pipeline.simulate import OpTimes, Timeline, simulate
from meshpar.planning.machine import Machine, Sizes
from meshpar.planning.stages import NOTHING, Busy
from meshpar.sharding.resolve import AnyMesh, platform_of

Key = TypeVar("Key")
CHUNKED = 1.1
"""A product in eight chunks of rows, over the whole: 1.08 to 1.14 on one H100 (scripts/bench_matmul.py, 2026-11-26)."""
FILLED = 4
"""Microbatches of a schedule over its stages from which more of them add no idle time."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step, and bytes that a device holds.

    Args:
      terms: what the step spends its time on -> seconds; they add up to `total_s`.
      beside_s: seconds of the communication beside products, hidden or not.
      states_bytes: bytes of parameters and the optimizer's state.
      step_bytes: bytes that the step holds beside them at its peak, see `cost.live`.
    """

    terms: Mapping[str, float]
    beside_s: float
    states_bytes: int
    step_bytes: int

    @property
    def total_s(self) -> float:
        return sum(self.terms.values())

    @property
    def order(self) -> tuple[float, float, float]:
        """Sorts the faster first; within a thousandth, what hides less communication; at last, what holds less."""
        return float(f"{self.total_s:.3g}"), self.beside_s, self.total_bytes

    @property
    def total_bytes(self) -> int:
        return self.states_bytes + self.step_bytes


@dataclass(frozen=True, eq=False)
class Operations:
    """What a device computes.

    Args:
      products: sizes of a product -> how often it runs.
      touched: another operation -> how often it runs.
    """

    products: Mapping[ProductSizes, float]
    touched: Mapping[Touch, float]

    @cached_property
    def flops(self) -> float:
        """Operations of all products."""
        return sum(one.num_flops * times for one, times in self.products.items())

    @cached_property
    def num_bytes(self) -> float:
        """Bytes that all other operations read and write."""
        return sum(one.num_bytes * times for one, times in self.touched.items())

    def __sub__(self, other: Operations) -> Operations:
        return Operations(_without(self.products, other.products), _without(self.touched, other.touched))

    def __mul__(self, factor: float) -> Operations:
        products = {one: times * factor for one, times in self.products.items()}
        return Operations(products, {one: times * factor for one, times in self.touched.items()})


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline.

    Args:
      layers: the number of layers of each stage.
      counted: of how many layers the work of a step is.
      ends: operations that only the last stage has, those of the output projection and the loss.
      last: the stage with the end of the model.
    """

    layers: Sequence[int]
    counted: int
    ends: Operations
    last: int

    @classmethod
    def of(cls, cut: StagePartition, schedule: Schedule, ends: Operations) -> Self:
        num_stages, num_chunks, longest = cut.layers.shape
        layers = (cut.layers >= 0).sum((1, 2)).tolist()
        return cls(layers, num_chunks * longest, ends, schedule.stage_of(num_stages * num_chunks - 1, num_stages))


@dataclass(frozen=True, eq=False)
class Work:
    """What a step does, whatever the machine.

    Args:
      computes: operations of a device; in a pipeline, of a stage with both ends of the model.
      beside: collectives that run beside products where a machine can do both.
      waits: collectives that products wait for.
      outer: collectives of the outer steps of local updates.
      outer_beside: the fraction of the steps beside which these run; 0 if the next step waits for them.
      idle: the makespan of the schedule over its work, if all stages take equally long; 1 without a pipeline.
      stages: the stages of a pipeline; None without one.
      dcn: (axis, size) of the part of the mesh's axes that is across hosts; empty where hosts follow the axes' order.
      in_loops: the number of a loop -> the part of the products that it runs; 0 for those outside of loops. Default:
        all collectives may hide behind all products.
    """

    mesh: AnyMesh
    computes: Operations
    beside: Sequence[Collective]
    waits: Sequence[Collective]
    idle: float
    states_bytes: int
    step_bytes: int
    outer: Sequence[Collective] = ()
    outer_beside: float = 0.0
    stages: Stages | None = None
    dcn: Sizes = ()
    in_loops: Mapping[int, float] = field(default_factory=lambda: {0: 1.0})

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends."""
        return float(sum(one.times * one.sent_bytes for one in [*self.beside, *self.waits, *self.outer]))

    def overlapping(self) -> Work:
        """The work if activations travel over `tensor` in chunks, beside products, see `collectives.matmul`.

        For the gradients of kernels the backward gathers their inputs again: half of all gathers are of inputs.
        """
        beside, waits = [*self.beside], []
        again = {"all_gather": Fraction(3, 2), "reduce_scatter": Fraction(1)}
        for one in self.waits:
            if one.axes == ("tensor",) and one.kind in again:
                size = one.group_size
                times = one.times * (size - 1) * again[one.kind]
                permute = Collective("collective_permute", one.axes, one.full_bytes // size, size, times, loop=one.loop)
                beside.append(permute)
            else:
                waits.append(one)
        products = {one: times * (1 if one.is_attention else CHUNKED) for one, times in self.computes.products.items()}
        return replace(self, beside=beside, waits=waits, computes=replace(self.computes, products=products))

    def on(self, machine: Machine) -> Estimate:
        """The estimate on a machine."""
        every = self.busy(machine)
        busiest = max(every, key=lambda one: one.total)
        computes = busiest.products + busiest.others
        beside, exposed = self._exposed(machine, computes)
        terms = {"products": busiest.products, "other operations": busiest.others}
        terms |= {f"exposed over {axes_name(axes)}": seconds for axes, seconds in exposed.items()}
        terms["new memory"] = machine.new_memory_s(self.step_bytes)
        terms |= {f"waits for {axes_name(axes)}": seconds for axes, seconds in busiest.waits.items()}
        if len(every) > 1:  # while the schedule fills and empties, the busiest stage waits for the others
            others = (sum(one.total for one in every) - busiest.total) / (len(every) - 1)
            terms["bubble"] = (self.idle - 1) * (others + sum(exposed.values()))
        outer = sum(machine.collective_s(one, self.mesh, self.dcn) for one in self.outer)
        hidden = self.outer_beside * computes if machine.overlaps else 0.0
        terms["outer steps"] = max(0.0, outer - hidden)
        shown = {term: seconds for term, seconds in terms.items() if seconds}
        return Estimate(shown, beside, self.states_bytes, self.step_bytes)

    def _exposed(self, machine: Machine, computes: float) -> tuple[float, dict[Axes, float]]:
        """Seconds of all communication beside products, and by axes of that which the products of its loop do not hide.

        Args:
          computes: seconds of a device's products and other operations.
        """
        by_loop: dict[int, dict[Axes, float]] = defaultdict(lambda: defaultdict(float))
        for one in self.beside:
            by_loop[one.loop if one.loop in self.in_loops else 0][one.axes] += machine.collective_s(
                one, self.mesh, self.dcn
            )
        total = 0.0
        exposed: dict[Axes, float] = defaultdict(float)
        for loop, by_axes in by_loop.items():
            seconds = sum(by_axes.values())
            total += seconds
            hidden = self.in_loops.get(loop, 0.0) * computes if machine.overlaps else 0.0
            left = max(0.0, 1 - hidden / seconds) if seconds else 0.0
            for axes, of_axes in by_axes.items():
                exposed[axes] += left * of_axes
        return total, exposed

    def busy(self, machine: Machine) -> list[Busy]:
        """The time of each stage of a pipeline, on its own chips; of one device, if there is no pipeline.

        Where devices share cores, one device's is the mean of all stages.
        """
        if self.stages is None:
            return [_busy(self, self.computes, self.waits, machine)]
        alike: dict[tuple[int, int, int], Busy] = {}
        every: list[Busy] = []
        for count, (layer, end) in zip(self.stages.layers, parts(self, machine), strict=True):
            key = (count, id(layer), id(end))
            if key not in alike:
                alike[key] = layer * count + end
            every.append(alike[key])
        return [sum(every, NOTHING) * (1 / len(every))] if machine.shares_cores else every


@lru_cache(maxsize=16)  # a search asks twice in a row
def parts(work: Work, machine: Machine) -> Sequence[tuple[Busy, Busy]]:
    """For each stage of a pipeline, the time of one layer and of what it has beside layers, on its own chips."""
    stages = work.stages
    assert stages is not None, "only a pipeline has stages"
    chips = machine.stages(work.mesh, work.dcn)
    of_kind: dict[int, tuple[Busy, Busy]] = {}
    for key, chip in {id(chip): chip for chip in chips}.items():
        ends = _busy(work, stages.ends, (), chip)
        layers = _busy(work, work.computes, work.waits, chip) + ends * -1.0
        of_kind[key] = layers * (1 / stages.counted), ends
    each = [of_kind[id(chip)] for chip in chips]
    return [(layer, ends if stage == stages.last else NOTHING) for stage, (layer, ends) in enumerate(each)]


def _busy(work: Work, computes: Operations, waits: Sequence[Collective], machine: Machine) -> Busy:
    products, others = _seconds(computes, machine)
    by_axes: dict[tuple[str, ...], float] = defaultdict(float)
    for one in waits:
        by_axes[one.axes] += machine.collective_s(one, work.mesh, work.dcn)
    return Busy(products, others, by_axes)


def work_of(prepared: Prepared) -> Work | None:
    """The work of a run's step, by its trace; None if that does not say what is sent, see `Prepared.traced_bytes`."""
    step = prepared.countable_step
    if step is None:
        return None
    collectives = prepared.collectives(step)
    waits = [one for one in collectives if one.kind != "collective_permute" and carries_activations(one, prepared)]
    remat = getattr(prepared.run.model, "remat", None)
    rounds = prepared.rounds
    computes = operations(step, prepared)
    dcn = prepared.run.mesh.dcn
    return Work(
        mesh=prepared.mesh,
        computes=computes,
        beside=[one for one in collectives if one not in waits],
        waits=waits,
        idle=idle(prepared.ctx.schedule, prepared.ctx.shards("stage"), getattr(remat, "policy", "") == "full"),
        states_bytes=prepared.states.parameters + prepared.states.optimizer,
        step_bytes=peak_bytes(step),
        outer=prepared.outer_collectives,
        outer_beside=float(1 / rounds.mean_steps_between) if rounds and rounds.overlap_steps else 0.0,
        stages=stages_of(computes, step, prepared),
        dcn=tuple((axis, size) for axis, size in dcn.sizes.items() if size > 1) if dcn else (),
        in_loops=in_loops(step),
    )


def in_loops(step: ClosedJaxpr) -> dict[int, float]:
    """The number of a loop -> the part of the products that it and the loops inside it run; 0 for those outside."""
    found: dict[int, float] = defaultdict(float)
    products = traced_products(step)
    for one in products:
        for loop in one.loops or (0,):
            found[loop] += float(one.total)
    total = sum(float(one.total) for one in products) or 1.0
    return {0: 0.0} | {loop: flops / total for loop, flops in found.items()}


def stages_of(computes: Operations, step: ClosedJaxpr, prepared: Prepared) -> Stages | None:
    """The stages of a traced step; None without a pipeline.

    Args:
      computes: the operations of a stage with both ends of the model. The mean of all p stages has 1/p of those ends.
    """
    num_stages = prepared.ctx.shards("stage")
    if prepared.pipeline is None or num_stages == 1:
        return None
    ends = (computes - operations(step, prepared, mean=True)) * (num_stages / (num_stages - 1))
    return Stages.of(prepared.pipeline.cut(prepared.ctx), prepared.pipeline.schedule, ends)


def _without(counts: Mapping[Key, float], others: Mapping[Key, float]) -> dict[Key, float]:
    left = {key: times - others.get(key, 0.0) for key, times in counts.items()}
    return {key: times for key, times in left.items() if times}


@lru_cache(maxsize=2**16)
def _seconds(of: Operations, machine: Machine) -> tuple[float, float]:
    """Seconds of products, and of other operations."""
    products = sum(times * machine.product_s(one) for one, times in of.products.items())
    return products, sum(times * machine.touch_s(one) for one, times in of.touched.items())


def operations(step: ClosedJaxpr, prepared: Prepared, mean: bool = False) -> Operations:
    """What a device computes in a traced step. GSPMD divides products outside of manual regions."""
    products: dict[ProductSizes, float] = defaultdict(float)
    for one in traced_products(step, mean):
        products[one.sizes] += float(one.times * one.num_shards / prepared.mesh.size)
    is_cpu = (platform_of(prepared.mesh) or "cpu") == "cpu"
    counted = touched_bytes(step, mean) if is_cpu else passes(step, mean)
    touched = {one: float(times) for one, times in counted.items()}
    if step is prepared.countable_step:
        updated, num_arrays = _update(step, prepared)
        touched[updated] = touched.get(updated, 0.0) + num_arrays
        if is_cpu and (transposed := _transposed(prepared)):
            moved = Touch(0, ((TRANSPOSE, transposed),))
            touched[moved] = touched.get(moved, 0.0) + 1
    return Operations(products, touched)


def _update(step: ClosedJaxpr, prepared: Prepared) -> tuple[Touch, int]:
    """The optimizer's update of the mean array, and the number of arrays.

    It is in no manual region. It reads the state and the gradients, and writes the state. A device computes functions
    of the elements whose state it has.
    """
    sharded = jax.tree.leaves(prepared.placement.sharded)
    num_arrays = len(sharded)
    states = prepared.states
    num_bytes = 2 * (states.parameters + states.optimizer) + states.gradients
    share = sum(one.local_bytes for one in sharded) / sum(one.spec.num_bytes for one in sharded)
    each = {name: round(count * share / num_arrays) for name, count in functions_outside(step).items()}
    return Touch(num_bytes // num_arrays, tuple(sorted(each.items()))), num_arrays


def _transposed(prepared: Prepared) -> int:
    """The elements that ZeRO-1's gathers transpose: those of parameters that it updates in shards of their last dim."""
    found = 0
    for updated, stored in prepared.placement.updated:
        if len(updated.axes) > 1 and updated.axes[-1] != stored.axes[-1]:
            found += math.prod(updated.local_shape) + math.prod(stored.local_shape)
    return found


def carries_activations(one: Collective, prepared: Prepared) -> bool:
    """Whether a collective moves activations, and no weights or gradients."""
    ctx = prepared.ctx
    rows = {*ctx.axes("seq")}
    if one.kind == "all_reduce" and rows & {*one.axes}:
        return False  # devices that share rows add their gradients
    activations = {*ctx.axes("residual_seq"), *ctx.axes("heads"), *ctx.dispatch("experts"), *rows}
    return not activations.isdisjoint(one.axes)


def idle(schedule: Schedule | None, num_stages: int, recomputes: bool) -> float:
    """The makespan of a schedule over the work of its busiest stage; 1 without a pipeline.

    The idle time is that of filling and emptying the pipeline, so a shorter schedule has as much of it.
    """
    if schedule is None:
        return 1.0
    count = min(schedule.num_microbatches, FILLED * num_stages)
    run = timeline(schedule.model_copy(update={"num_microbatches": count}), num_stages, recomputes)
    return 1 + (run.makespan / run.work - 1) * count / schedule.num_microbatches


def timeline(schedule: Schedule, num_stages: int, recomputes: bool, shares: Sequence[float] = ()) -> Timeline:
    """A schedule whose backward takes two forwards, or three if it recomputes.

    Args:
      shares: the time of each stage, over that of the busiest one. Default: all stages are equal.
    """
    chunks = schedule.chunks_per_stage
    stages = [schedule.stage_of(virtual, num_stages) for virtual in range(num_stages * chunks)]
    by_chunk = [shares[stage] / chunks for stage in stages] if shares else ()
    return simulate(schedule, num_stages, OpTimes(B=2.0 if recomputes else 1.0, shares=by_chunk))
