"""Simulates a schedule: each stage runs its operations in order and waits for the inputs of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshpar.errors import Problems, ScheduleError
from meshpar.parallel.pipeline.schedule import Op, Order, Schedule


@dataclass(frozen=True)
class OpTimes:
    """The times of operations on a whole stage, in any unit; on one of v chunks they are 1/v of it.

    Args:
      transfer: the time in which an activation or a cotangent reaches another stage.
      shares: for each virtual stage, the share of the times that it takes. Default: 1/v.
    """

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0
    transfer: float = 0.0
    shares: Sequence[float] = ()


@dataclass(frozen=True)
class TimedOp:
    """An operation of a stage, and when it runs."""

    stage: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation.

    Args:
      ran: all operations, in the order in which they end.
      work: the time for which the busiest stage is busy.
      chunks: v, the number of chunks of a stage.
    """

    ran: tuple[TimedOp, ...]
    num_stages: int
    work: float
    chunks: int

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end: the duration of a step that waits for all stages."""
        return max(one.end for one in self.ran)

    @property
    def span(self) -> float:
        """The longest time from a stage's first start to its last end: the duration of a step if steps overlap."""
        return max(max(one.end for one in mine) - min(one.start for one in mine) for mine in self.stages)

    @property
    def bubble(self) -> float:
        """The idle fraction of `span`, as the zero-bubble papers define it."""
        return 1 - self.work / self.span

    @property
    def idle(self) -> float:
        """The idle fraction of `makespan`."""
        return 1 - self.work / self.makespan

    @cached_property
    def stages(self) -> list[list[TimedOp]]:
        return [[one for one in self.ran if one.stage == stage] for stage in range(self.num_stages)]

    @property
    def peak(self) -> float:
        """The most activations that a stage holds at once; the unit is one microbatch on a whole stage.

        They are held from the start of F to the end of W, or of B if there is no W.
        """
        return max(_peak(mine, "W" if self.splits else "B") for mine in self.stages) / self.chunks

    @property
    def splits(self) -> bool:
        return any(one.op.kind == "W" for one in self.ran)


def simulate(schedule: Schedule, num_stages: int, times: OpTimes = OpTimes()) -> Timeline:
    """Computes when each operation of a schedule runs.

    Raises:
      ScheduleError: an operation is missing or occurs twice; or the stages wait for each other. It lists each stage
        that waits, since when, in which operation, and for which.

    >>> from meshpar.parallel.pipeline.schedule import OneFOneB
    >>> run = simulate(OneFOneB(num_microbatches=8), 4)
    >>> run.makespan, run.peak
    (33.0, 4.0)
    """
    return simulate_orders(schedule.orders(num_stages), schedule, times)


def simulate_orders(orders: Sequence[Order], schedule: Schedule, times: OpTimes = OpTimes()) -> Timeline:
    """`simulate` for other orders than those of the schedule, with its placement of chunks."""
    check_complete(orders, schedule)
    return timeline(orders, schedule, times)


def timeline(orders: Sequence[Order], schedule: Schedule, times: OpTimes) -> Timeline:
    """`simulate_orders` for orders that may be incomplete, such as forwards only.

    Raises:
      ScheduleError: the stages wait for each other.
    """
    run = _Run(orders, schedule, times)
    while run.advance():
        pass
    run.raise_if_stuck()
    ran = sorted(run.ran.values(), key=lambda one: (one.end, one.stage))
    work = max(sum(run.duration(stage, op) for op in order) for stage, order in enumerate(orders))
    return Timeline(tuple(ran), len(orders), work, schedule.chunks_per_stage)


def check_complete(orders: Sequence[Order], schedule: Schedule) -> None:
    """Checks that every microbatch has each operation exactly once on every chunk.

    Raises:
      ScheduleError: lists the operations that are missing, occur twice or have no microbatch.
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
            ("unknown microbatch, chunk or kind", counts.keys() - wanted),
        ):
            if ops:
                problems.add(f"stage {stage}", f"{what}: {', '.join(map(str, sorted(ops)))}")
    problems.raise_any(ScheduleError, "the schedule does not have every operation exactly once:")


def splits(orders: Iterable[Order]) -> bool:
    """Whether any order has W apart from B."""
    return any(op.kind == "W" for order in orders for op in order)


class _Run:
    """The state of a simulation. Of each stage: `done` operations have run, and it is `free` from that time on."""

    def __init__(self, orders: Sequence[Order], schedule: Schedule, times: OpTimes):
        self.orders = orders
        self.chunks = schedule.chunks_per_stage
        self.route = Route(schedule, len(orders))
        self.times = times
        self.splits = splits(orders)
        self.done = [0] * len(orders)
        self.free = [0.0] * len(orders)
        self.ran: dict[tuple[int, Op], TimedOp] = {}

    def advance(self) -> bool:
        """Runs each stage as far as it can; returns False if no stage could run anything."""
        before = sum(self.done)
        for stage, order in enumerate(self.orders):
            while self.done[stage] < len(order) and self._try(stage, order[self.done[stage]]):
                self.done[stage] += 1
        return sum(self.done) > before

    def duration(self, stage: int, op: Op) -> float:
        whole = self.times.B + self.times.W if op.kind == "B" and not self.splits else getattr(self.times, op.kind)
        shares = self.times.shares
        return whole * shares[self.route.virtual(stage, op.chunk)] if shares else whole / self.chunks

    def _try(self, stage: int, op: Op) -> bool:
        needs = self.route.needed(op, stage)
        if not all(need in self.ran for need in needs):
            return False
        start = self.free[stage]
        for need in needs:
            transfer = self.times.transfer if need[0] != stage else 0.0
            start = max(start, self.ran[need].end + transfer)
        self.free[stage] = start + self.duration(stage, op)
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
                    at = self.orders[there][self.done[there]]
                    what = f"{op} waits for {need} of stage {there}, which is at {at}"
                    problems.add(f"stage {stage}, tick {self.free[stage]:g}", what)
        problems.raise_any(ScheduleError, "the stages wait for each other:")


class Route:
    """The stage of each virtual stage, and the operations that each operation depends on.

    Attributes:
      stages: the stage of each virtual stage, first to last.
    """

    def __init__(self, schedule: Schedule, num_stages: int):
        self.stages = [schedule.stage_of(k, num_stages) for k in range(num_stages * schedule.chunks_per_stage)]
        self.num_stages = num_stages
        self._virtual = {(stage, k // num_stages): k for k, stage in enumerate(self.stages)}

    def virtual(self, stage: int, chunk: int) -> int:
        """The virtual stage of a stage's chunk."""
        return self._virtual[stage, chunk]

    def needed(self, op: Op, stage: int) -> list[tuple[int, Op]]:
        """The (stage, operation) pairs that `op` depends on, without those that precede it in the stage's order."""
        k = self._virtual[stage, op.chunk]
        needs = {"F": [("F", k - 1)], "B": [("F", k), ("B", k + 1)], "W": [("B", k)]}[op.kind]
        return [
            (self.stages[k], Op(kind, op.microbatch, k // self.num_stages))
            for kind, k in needs if 0 <= k < len(self.stages)
        ]  # fmt: skip


def _peak(ran: Iterable[TimedOp], last: str) -> int:
    """The largest number of F that have begun and whose operation `last` has not ended."""
    changes = [(one.start, 1) for one in ran if one.op.kind == "F"]
    changes += [(one.end, -1) for one in ran if one.op.kind == last]
    held = peak = 0
    for _, change in sorted(changes):  # at equal times ends come before starts
        held += change
        peak = max(peak, held)
    return peak
