"""When each operation of a schedule runs, if each stage does its own in order and waits for what it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshpar.errors import Problems, ScheduleError
from meshpar.parallel.pipeline.schedule import Op, Order, Schedule


@dataclass(frozen=True)
class OpTimes:
    """How long an operation on a whole stage takes, in any unit; of a chunk, its part.

    Args:
      transfer: of an activation or a cotangent, to another stage.
    """

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0
    transfer: float = 0.0


@dataclass(frozen=True)
class TimedOp:
    """One operation, and when."""

    stage: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What a simulation says.

    Args:
      ran: all operations, in the order in which they end.
      work: the time that a stage is busy, of the one that is so longest.
      chunks: v, of a stage.
    """

    ran: tuple[TimedOp, ...]
    num_stages: int
    work: float
    chunks: int

    @property
    def makespan(self) -> float:
        """From the first start to the last end: what a step takes that waits for all stages."""
        return max(one.end for one in self.ran)

    @property
    def span(self) -> float:
        """The longest time from a stage's first start to its last end: a step's, if the next begins meanwhile."""
        return max(max(one.end for one in mine) - min(one.start for one in mine) for mine in self.stages)

    @property
    def bubble(self) -> float:
        """The idle part of `span`, which is how zero-bubble schedules count it."""
        return 1 - self.work / self.span

    @property
    def idle(self) -> float:
        """The idle part of `makespan`."""
        return 1 - self.work / self.makespan

    @cached_property
    def stages(self) -> list[list[TimedOp]]:
        return [[one for one in self.ran if one.stage == stage] for stage in range(self.num_stages)]

    @property
    def peak(self) -> float:
        """Activations held at once by the stage that holds most, in those of a whole stage for one microbatch.

        They are held from the start of F to the end of W, or of B where there is no W.
        """
        return max(_peak(mine, "W" if self.splits else "B") for mine in self.stages) / self.chunks

    @property
    def splits(self) -> bool:
        return any(one.op.kind == "W" for one in self.ran)


def simulate(schedule: Schedule, num_stages: int, times: OpTimes = OpTimes()) -> Timeline:
    """Runs a schedule on paper.

    Raises:
      ScheduleError: an operation is missing or stands twice; or the stages wait for each other, and then which
        stage, since when, in which operation, for what.

    >>> from meshpar.parallel.pipeline.schedule import OneFOneB
    >>> told = simulate(OneFOneB(num_microbatches=8), 4)
    >>> told.makespan, told.peak
    (33.0, 4.0)
    """
    return simulate_orders(schedule.orders(num_stages), schedule, times)


def simulate_orders(orders: Sequence[Order], schedule: Schedule, times: OpTimes = OpTimes()) -> Timeline:
    """The same, of orders that lie on the stages as the schedule says."""
    check_complete(orders, schedule)
    return timeline(orders, schedule, times)


def timeline(orders: Sequence[Order], schedule: Schedule, times: OpTimes) -> Timeline:
    """The same, of orders that may leave something out, such as all backwards.

    Raises:
      ScheduleError: the stages wait for each other.
    """
    run = _Run(orders, schedule, times)
    while run.advance():
        pass
    run.raise_if_stuck()
    ran = sorted(run.ran.values(), key=lambda one: (one.end, one.stage))
    work = max(sum(run.duration(op) for op in order) for order in orders)
    return Timeline(tuple(ran), len(orders), work, schedule.chunks_per_stage)


def check_complete(orders: Sequence[Order], schedule: Schedule) -> None:
    """Every microbatch goes once through every chunk, forward and back.

    Raises:
      ScheduleError: lists what is missing, and what stands twice or is of no microbatch.
    """
    problems = Problems()
    kinds = "FBW" if splits(orders) else "FB"
    wanted = {
        Op(kind, j, chunk)
        for kind in kinds for j in range(schedule.num_microbatches) for chunk in range(schedule.chunks_per_stage)
    }  # fmt: skip
    for stage, order in enumerate(orders):
        counts = Counter(order)
        for what, ops in (
            ("missing", wanted - counts.keys()),
            ("more than once", {op for op in wanted if counts[op] > 1}),
            ("of no microbatch, chunk or kind", counts.keys() - wanted),
        ):
            if ops:
                problems.add(f"stage {stage}", f"{what}: {', '.join(map(str, sorted(ops)))}")
    problems.raise_any(ScheduleError, "the schedule is not one:")


def splits(orders: Iterable[Order]) -> bool:
    """Whether W are apart from B."""
    return any(op.kind == "W" for order in orders for op in order)


class _Run:
    """A simulation on its way: how far each stage has come."""

    def __init__(self, orders: Sequence[Order], schedule: Schedule, times: OpTimes):
        self.orders, self.chunks, self.route = orders, schedule.chunks_per_stage, Route(schedule, len(orders))
        self.times, self.splits = times, splits(orders)
        self.done = [0] * len(orders)
        self.free = [0.0] * len(orders)
        self.ran: dict[tuple[int, Op], TimedOp] = {}

    def advance(self) -> bool:
        """Every stage goes on as far as it can; False if none could."""
        before = sum(self.done)
        for stage, order in enumerate(self.orders):
            while self.done[stage] < len(order) and self._try(stage, order[self.done[stage]]):
                self.done[stage] += 1
        return sum(self.done) > before

    def duration(self, op: Op) -> float:
        whole = self.times.B + self.times.W if op.kind == "B" and not self.splits else getattr(self.times, op.kind)
        return whole / self.chunks

    def _try(self, stage: int, op: Op) -> bool:
        needs = self.route.needed(op, stage)
        if not all(need in self.ran for need in needs):
            return False
        arrived = (self.ran[need].end + self.times.transfer * (need[0] != stage) for need in needs)
        start = max([self.free[stage], *arrived])
        self.free[stage] = start + self.duration(op)
        self.ran[stage, op] = TimedOp(stage, op, start, self.free[stage])
        return True

    def raise_if_stuck(self) -> None:
        problems = Problems()
        for stage, order in enumerate(self.orders):
            if self.done[stage] == len(order):
                continue
            op = order[self.done[stage]]
            for there, need in self.route.needed(op, stage):
                if (there, need) not in self.ran:
                    what = f"waits in {op} for {need} of stage {there}, which is at {self._next(there)}"
                    problems.add(f"stage {stage}, tick {self.free[stage]:g}", what)
        problems.raise_any(ScheduleError, "the stages wait for each other:")

    def _next(self, stage: int) -> Op:
        return self.orders[stage][self.done[stage]]


class Route:
    """Where each virtual stage lies, and what each operation needs to be done before.

    Args:
      stages: stage of each virtual stage, first to last.
    """

    def __init__(self, schedule: Schedule, num_stages: int):
        self.stages = [schedule.stage_of(k, num_stages) for k in range(num_stages * schedule.chunks_per_stage)]
        self.num_stages = num_stages
        self._virtual = {(stage, k // num_stages): k for k, stage in enumerate(self.stages)}

    def virtual(self, stage: int, chunk: int) -> int:
        """The virtual stage that is a stage's chunk."""
        return self._virtual[stage, chunk]

    def needed(self, op: Op, stage: int) -> list[tuple[int, Op]]:
        """Besides what the stage's order says: (stage, operation)."""
        k = self._virtual[stage, op.chunk]
        needs = {"F": [("F", k - 1)], "B": [("F", k), ("B", k + 1)], "W": [("B", k)]}[op.kind]
        return [
            (self.stages[k], Op(kind, op.microbatch, k // self.num_stages))
            for kind, k in needs if 0 <= k < len(self.stages)
        ]  # fmt: skip


def _peak(ran: Iterable[TimedOp], last: str) -> int:
    """F that have begun whose `last` has not ended, at most."""
    changes = [(one.start, 1) for one in ran if one.op.kind == "F"]
    changes += [(one.end, -1) for one in ran if one.op.kind == last]
    held = peak = 0
    for _, change in sorted(changes):  # what ends is gone before what begins
        held += change
        peak = max(peak, held)
    return peak
