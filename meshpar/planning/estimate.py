"""What a step takes and holds on a machine, by its trace: nothing is compiled.

    step = (products, or the communication beside them, whichever is longer, + exposed communication)
           * the schedule's makespan over its work

Products take their operations at the machine's rate. Weights are gathered and gradients reduced while others are
computed, and permutes, of attention's rings and of a pipeline's messages, travel beside products too: they are hidden
where devices communicate while they compute. Activations that a product waits for are exposed.

The trace of a pipeline's step has the products of its busiest stage. The simulation of its schedule says how much
longer the step is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshpar.cost.flops import flops, traced_products
from meshpar.cost.live import peak_bytes
from meshpar.cost.traced import Collective
from meshpar.experiment.prepare import Prepared
from meshpar.inspection.inspect import axes_name
from meshpar.parallel.pipeline.schedule import Schedule
from meshpar.parallel.pipeline.simulate import OpTimes, simulate
from meshpar.planning.machine import Machine
from meshpar.sharding.resolve import AnyMesh


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


@dataclass(frozen=True)
class Work:
    """What a step does, whatever the machine.

    Args:
      flops: operations of the products of a device.
      beside: collectives that run beside products where a machine can do both.
      waits: collectives that products wait for.
      idle: the schedule's makespan over its work; 1 without a pipeline.
    """

    mesh: AnyMesh
    flops: float
    beside: Sequence[Collective]
    waits: Sequence[Collective]
    idle: float
    states_bytes: int
    step_bytes: int

    def on(self, machine: Machine) -> Estimate:
        """The estimate on a machine."""
        terms: dict[str, float] = defaultdict(float)
        products = terms["products"] = self.flops / machine.flops
        beside = sum(machine.seconds(one, self.mesh) for one in self.beside)
        terms["weights and gradients"] = max(0.0, beside - products) if machine.overlaps else beside
        for one in self.waits:
            terms[f"waits for {axes_name(one.axes)}"] += machine.seconds(one, self.mesh)
        terms["bubble"] = sum(terms.values()) * (self.idle - 1)
        shown = {term: seconds for term, seconds in terms.items() if seconds}
        return Estimate(shown, beside, self.states_bytes, self.step_bytes)


def traced(prepared: Prepared) -> Work | None:
    """The work of a run's step, by its trace; None if that does not say what is sent, see `Prepared.traced_bytes`."""
    step = prepared.countable_step
    if step is None:
        return None
    collectives = prepared.collectives(step)
    waits = [one for one in collectives if one.kind != "collective_permute" and carries_activations(one, prepared)]
    remat = getattr(prepared.run.model, "remat", None)
    return Work(
        mesh=prepared.mesh,
        flops=float(sum(flops(traced_products(step), prepared.mesh.size).values())),
        beside=[one for one in collectives if one not in waits],
        waits=waits,
        idle=_idle(prepared.ctx.schedule, prepared.ctx.shards("stage"), getattr(remat, "policy", "") == "full"),
        states_bytes=prepared.states.parameters + prepared.states.optimizer,
        step_bytes=peak_bytes(step),
    )


def carries_activations(one: Collective, prepared: Prepared) -> bool:
    """Whether a collective moves activations, and no weights or gradients."""
    ctx = prepared.ctx
    rows = {*ctx.axes("seq")}
    if one.kind == "all_reduce" and rows & {*one.axes}:
        return False  # devices that share rows add their gradients
    activations = {*ctx.axes("residual_seq"), *ctx.axes("heads"), *ctx.dispatch("experts"), *rows}
    return not activations.isdisjoint(one.axes)


def _idle(schedule: Schedule | None, num_stages: int, recomputes: bool) -> float:
    """The makespan of a schedule over the work of its busiest stage. A backward takes two forwards."""
    if schedule is None:
        return 1.0
    again = 1.0 if recomputes else 0.0
    splits = any(op.kind == "W" for op in schedule.order(0, num_stages))
    times = OpTimes(B=1.0 + again) if splits else OpTimes(B=2.0 + again)
    run = simulate(schedule, num_stages, times)
    return run.makespan / run.work
