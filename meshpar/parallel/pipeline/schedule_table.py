"""Orders as tables that one program reads: what each stage does in each tick, and where it finds and puts what.

In a tick every stage does at most one F, B or W, and then hands on what it made. A backward that is not split is a B
and a W that follows at once: so ticks are of equal length, and a cotangent travels on before the gradient of the
weights is worked out. What waits is kept in slots, as few as the schedule lets be: messages from their arrival until
they are used, residuals of a forward until the end of its W, and what B leaves for W.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from meshpar.parallel.pipeline.schedule import Op, Order, Schedule
from meshpar.parallel.pipeline.simulate import OpTimes, Route, TimedOp, Timeline, splits, timeline

IDLE, KINDS = 0, {"F": 1, "B": 2, "W": 3}


class TableRow(NamedTuple):
    """What a stage does in a tick; as arrays [tick, stage], all ticks.

    Args:
      kind: 0 idle, or of `KINDS`.
      first, last: whether the chunk is the first or the last of the whole model.
      inbox: the slot where F finds its input, and B its cotangent; of the last chunk, its output.
      from_left, from_right, own: slots where messages that come at the end of the tick are put, or `num_inbox`,
        where nothing is ever read: of the stage before, of the one after, and of itself.
    """

    kind: Any
    microbatch: Any
    chunk: Any
    first: Any
    last: Any
    inbox: Any
    residual: Any
    stash: Any
    from_left: Any
    from_right: Any
    own: Any


@dataclass(frozen=True)
class ScheduleTable:
    """A schedule on a number of stages, ready to be executed.

    Args:
      rows: int32 [num_ticks, num_stages] each.
      num_inbox, num_residuals, num_stashes: slots that the stage with most of them needs.
    """

    rows: TableRow
    num_inbox: int
    num_residuals: int
    num_stashes: int

    @property
    def num_ticks(self) -> int:
        return len(self.rows.kind)


def tick_table(orders: list[Order], schedule: Schedule) -> ScheduleTable:
    """The table of orders that are complete and do not wait for each other.

    >>> from meshpar.parallel.pipeline.schedule import OneFOneB
    >>> ticks = tick_table(OneFOneB(num_microbatches=8).orders(4), OneFOneB(num_microbatches=8))
    >>> ticks.num_ticks, ticks.num_residuals
    (30, 4)
    """
    return _Table(orders, schedule).ticks()


def in_ticks(orders: list[Order], schedule: Schedule, times: OpTimes | None = None) -> Timeline:
    """When each operation runs, W apart from B; if no times are given, in ticks, of which each lasts one."""
    v = float(schedule.chunks_per_stage)
    return timeline([split_backwards(order) for order in orders], schedule, times or OpTimes(v, v, v))


def split_backwards(order: Order) -> Order:
    """The same order, each B followed by its W, unless it has W of its own."""
    if splits([order]) or not any(op.kind == "B" for op in order):
        return order
    return [each for op in order for each in ([op, Op("W", *op[1:])] if op.kind == "B" else [op])]


class _Table:
    def __init__(self, orders: list[Order], schedule: Schedule):
        self.route, self.num_stages = Route(schedule, len(orders)), len(orders)
        self.ran = in_ticks(orders, schedule).ran
        self.tick = {(one.stage, one.op): round(one.start) for one in self.ran}
        self.num_ticks = max(self.tick.values()) + 1

    def ticks(self) -> ScheduleTable:
        inbox = [(*span, key) for key, span in self._messages().items()]
        residuals = [(self.tick[s, op], self._end(s, op), (s, op[1:])) for s, op in self.tick if op.kind == "F"]
        stashes = [(self.tick[s, op], self._end(s, op), (s, op[1:])) for s, op in self.tick if op.kind == "B"]
        slots = [_slots(spans) for spans in (inbox, residuals, stashes)]
        counts = [max([slot + 1 for slot in found.values()], default=0) for found in slots]
        rows = TableRow(*(np.zeros((self.num_ticks, self.num_stages), np.int32) for _ in TableRow._fields))
        for unused in (rows.from_left, rows.from_right, rows.own):
            unused[:] = counts[0]
        for one in self.ran:
            self._fill(rows, one, *slots)
        return ScheduleTable(rows, *counts)

    def _fill(self, rows: TableRow, one: TimedOp, inbox: _Found, residuals: _Found, stashes: _Found) -> None:
        t, s, op = round(one.start), one.stage, one.op
        virtual = self.route.virtual(s, op.chunk)
        rows.kind[t, s], rows.microbatch[t, s], rows.chunk[t, s] = KINDS[op.kind], op.microbatch, op.chunk
        rows.first[t, s], rows.last[t, s] = virtual == 0, virtual == len(self.route.stages) - 1
        rows.inbox[t, s] = inbox.get((s, op), 0)
        rows.residual[t, s] = residuals[s, op[1:]]
        rows.stash[t, s] = stashes.get((s, op[1:]), 0)
        if (to := self._receiver(s, op)) is not None and to in inbox:
            self._way(rows, s, to[0])[t, to[0]] = inbox[to]

    def _way(self, rows: TableRow, stage: int, to: int) -> np.ndarray:
        if to == stage:
            return rows.own
        # Of two stages each is the other's neighbour on both sides: what passes between them comes from the left.
        return rows.from_left if to == (stage + 1) % self.num_stages else rows.from_right

    def _receiver(self, stage: int, op: Op) -> tuple[int, Op] | None:
        """Who needs what an operation makes: the next chunk, the one before, or, at the end, its own backward."""
        virtual, last = self.route.virtual(stage, op.chunk), len(self.route.stages) - 1
        if op.kind == "W" or (op.kind == "B" and virtual == 0):
            return None
        if op.kind == "F" and virtual == last:
            return stage, Op("B", *op[1:])
        to = virtual + (1 if op.kind == "F" else -1)
        return self.route.stages[to], Op(op.kind, op.microbatch, to // self.num_stages)

    def _messages(self) -> dict[tuple[int, Op], tuple[int, int]]:
        """Receiver -> the ticks from the arrival of its message to its use."""
        sent = {self._receiver(stage, op): tick for (stage, op), tick in self.tick.items()}
        return {to: (tick + 1, self.tick[to]) for to, tick in sent.items() if to is not None and to in self.tick}

    def _end(self, stage: int, op: Op) -> int:
        return self.tick.get((stage, Op("W", *op[1:])), self.tick[stage, op])


_Found = dict[tuple[int, tuple], int]


def _slots(spans: Iterable[tuple[int, int, tuple[int, tuple]]]) -> _Found:
    """A slot for each span of ticks [first, last], the lowest that is free on its stage."""
    busy: dict[int, list[int]] = defaultdict(list)  # stage -> last tick of each of its slots
    found: _Found = {}
    for first, last, key in sorted(spans):
        ends = busy[key[0]]
        slot = next((i for i, end in enumerate(ends) if end < first), len(ends))
        ends[slot : slot + 1] = [last]
        found[key] = slot
    return found
