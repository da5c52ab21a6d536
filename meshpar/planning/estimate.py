"""What a step takes and holds on a machine, by its trace: nothing is compiled.

    step = (computation, or the communication beside it, whichever is longer, + exposed communication)
           * the schedule's makespan over its work

Products take their operations at the machine's rate, other operations the bytes that they read and write. Weights are
gathered and gradients reduced while others are computed, and permutes, of attention's rings and of a pipeline's
messages, travel beside products too: they are hidden where devices communicate while they compute. Activations that a
product waits for are exposed.

The trace of a pipeline's step has the products of its busiest stage. The simulation of its schedule says how much
longer the step is. Simulated devices share cores: nothing is hidden, and no core is idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import jax
from jax.extend.core import ClosedJaxpr

from meshpar.cost.flops import traced_products
from meshpar.cost.live import peak_bytes
from meshpar.cost.touched import Touch, functions_outside, touched_bytes
from meshpar.cost.traced import Collective
from meshpar.experiment.prepare import Prepared
from meshpar.inspection.inspect import axes_name
from meshpar.parallel.pipeline.schedule import Schedule
from meshpar.parallel.pipeline.simulate import OpTimes, Timeline, simulate
from meshpar.planning.machine import Machine
from meshpar.sharding.resolve import AnyMesh

FILLED = 4
"""Microbatches of a schedule over its stages from which more of them add no idle time."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step, and bytes that a device holds.

    Args:
      terms: what the step spends its time on -> seconds; they add up to `total_s`.
      beside_s: seconds of the communication beside products, hidden or not.
      states_bytes: of parameters and the optimizer's state.
      step_bytes: of what the step holds beside them at its peak, see `cost.live`.
    """

    terms: Mapping[str, float]
    beside_s: float
    states_bytes: int
    step_bytes: int

    @property
    def total_s(self) -> float:
        return sum(self.terms.values())

    @property
    def order(self) -> tuple[float, float]:
        """Sorts the faster first; of those within a thousandth, the one that hides less communication."""
        return float(f"{self.total_s:.3g}"), self.beside_s

    @property
    def total_bytes(self) -> int:
        return self.states_bytes + self.step_bytes


@dataclass(frozen=True, eq=False)
class Operations:
    """What a device computes.

    Args:
      products: operations of a product -> how often it runs.
      touched: another operation -> how often it runs.
    """

    products: Mapping[int, float]
    touched: Mapping[Touch, float]

    @property
    def flops(self) -> float:
        """Operations of all products."""
        return sum(flops * times for flops, times in self.products.items())


@dataclass(frozen=True)
class Work:
    """What a step does, whatever the machine.

    Args:
      computes: operations of a device.
      beside: collectives that run beside products where a machine can do both.
      waits: collectives that products wait for.
      outer: those of the outer steps of local updates.
      outer_beside: the part of the steps beside which these run; 0 if the next step waits for them.
      idle: the schedule's makespan over its work; 1 without a pipeline.
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

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends."""
        return float(sum(one.times * one.sent_bytes for one in [*self.beside, *self.waits, *self.outer]))

    def on(self, machine: Machine) -> Estimate:
        """The estimate on a machine."""
        terms: dict[str, float] = defaultdict(float)
        products, others = _seconds(self.computes, machine)
        terms["products"] = products
        terms["other operations"] = others
        terms["new memory"] = machine.new_memory_s(self.step_bytes)
        beside = sum(machine.collective_s(one, self.mesh) for one in self.beside)
        terms["weights and gradients"] = max(0.0, beside - products - others) if machine.overlaps else beside
        for one in self.waits:
            terms[f"waits for {axes_name(one.axes)}"] += machine.collective_s(one, self.mesh)
        terms["bubble"] = 0.0 if machine.shares_cores else sum(terms.values()) * (self.idle - 1)
        outer = sum(machine.collective_s(one, self.mesh) for one in self.outer)
        hidden = self.outer_beside * (products + others) if machine.overlaps else 0.0
        terms["outer steps"] = max(0.0, outer - hidden)
        shown = {term: seconds for term, seconds in terms.items() if seconds}
        return Estimate(shown, beside, self.states_bytes, self.step_bytes)


def work_of(prepared: Prepared, mean: bool = False) -> Work | None:
    """The work of a run's step, by its trace; None if that does not say what is sent, see `Prepared.traced_bytes`.

    Args:
      mean: of all stages of a pipeline, for devices that share cores; else of its busiest stage.
    """
    step = prepared.countable_step
    if step is None:
        return None
    collectives = prepared.collectives(step)
    waits = [one for one in collectives if one.kind != "collective_permute" and carries_activations(one, prepared)]
    remat = getattr(prepared.run.model, "remat", None)
    rounds = prepared.rounds
    return Work(
        mesh=prepared.mesh,
        computes=operations(step, prepared, mean),
        beside=[one for one in collectives if one not in waits],
        waits=waits,
        idle=_idle(prepared.ctx.schedule, prepared.ctx.shards("stage"), getattr(remat, "policy", "") == "full"),
        states_bytes=prepared.states.parameters + prepared.states.optimizer,
        step_bytes=peak_bytes(step),
        outer=prepared.outer_collectives,
        outer_beside=float(1 / rounds.mean_steps_between) if rounds and rounds.overlap_steps else 0.0,
    )


@lru_cache(maxsize=2**16)
def _seconds(of: Operations, machine: Machine) -> tuple[float, float]:
    """Seconds of products, and of other operations."""
    products = sum(times * machine.product_s(flops) for flops, times in of.products.items())
    return products, sum(times * machine.touch_s(one) for one, times in of.touched.items())


def operations(step: ClosedJaxpr, prepared: Prepared, mean: bool = False) -> Operations:
    """What a device computes in a traced step. GSPMD divides products outside of manual regions."""
    products: dict[int, float] = defaultdict(float)
    for one in traced_products(step, mean):
        products[one.num_flops] += float(one.times * one.num_shards / prepared.mesh.size)
    touched = {one: float(times) for one, times in touched_bytes(step, mean).items()}
    if step is prepared.countable_step:
        updated, num_arrays = _update(step, prepared)
        touched[updated] = touched.get(updated, 0.0) + num_arrays
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


def carries_activations(one: Collective, prepared: Prepared) -> bool:
    """Whether a collective moves activations, and no weights or gradients."""
    ctx = prepared.ctx
    rows = {*ctx.axes("seq")}
    if one.kind == "all_reduce" and rows & {*one.axes}:
        return False  # devices that share rows add their gradients
    activations = {*ctx.axes("residual_seq"), *ctx.axes("heads"), *ctx.dispatch("experts"), *rows}
    return not activations.isdisjoint(one.axes)


def _idle(schedule: Schedule | None, num_stages: int, recomputes: bool) -> float:
    """The makespan of a schedule over the work of its busiest stage; 1 without a pipeline.

    The idle time is that of filling and emptying the pipeline, so a shorter schedule has as much of it.
    """
    if schedule is None:
        return 1.0
    count = min(schedule.num_microbatches, FILLED * num_stages)
    run = timeline(schedule.model_copy(update={"num_microbatches": count}), num_stages, recomputes)
    return 1 + (run.makespan / run.work - 1) * count / schedule.num_microbatches


def timeline(schedule: Schedule, num_stages: int, recomputes: bool) -> Timeline:
    """A schedule whose backward takes two forwards, or three if it recomputes."""
    again = 1.0 if recomputes else 0.0
    splits = any(op.kind == "W" for op in schedule.order(0, num_stages))
    return simulate(schedule, num_stages, OpTimes(B=1.0 + again) if splits else OpTimes(B=2.0 + again))
