"""Compiles orders to a table that one program reads: the operation of each stage in each tick, and its slots.

In a tick every stage runs at most one F, B or W, and sends its output if another operation needs it. A backward that is
not split is a B followed by its W. So ticks have equal length, and a cotangent is sent before the weights' gradient is
computed. Slots hold messages from their arrival until they are used, residuals from F to the end of W, and the stash
from B to W. Their number is the smallest that the schedule allows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from meshpar.parallel.pipeline.schedule import Op, Order, Schedule
from meshpar.parallel.pipeline.simulate import OpTimes, Route, TimedOp, Timeline, splits, timeline

IDLE = 0
KINDS = {"F": 1, "B": 2, "W": 3}


Pattern = tuple[tuple[tuple[int, int], ...], ...]
"""The messages of a tick, as one permutation for each round: pairs (source, target) of stages.

A stage sends at most one message in a tick, and receives at most two: from the previous and from the next stage. In a
round it receives at most one, so a round is a permute.
"""


class TableRow(NamedTuple):
    """The operation of a stage in a tick; or of all stages in all ticks, as arrays [tick, stage].

    Args:
      kind: `IDLE`, or one of `KINDS`.
      first, last: whether the chunk is the first or the last of the whole model.
      inbox: the slot with the input of F or the cotangent of B; for B of the last chunk, with the output of its F.
      received: [..., round], the slots that store the messages of the other stages at the end of the tick; `num_inbox`,
        a slot that is never read, in a round without a message for the stage.
      own: the slot that stores the message of the stage to itself; or `num_inbox`.
    """

    kind: Any
    microbatch: Any
    chunk: Any
    first: Any
    last: Any
    inbox: Any
    residual: Any
    stash: Any
    received: Any
    own: Any


@dataclass(frozen=True)
class ScheduleTable:
    """A schedule on a number of stages, ready to be executed.

    Args:
      rows: int32 [num_ticks, num_stages] each; `received` [num_ticks, num_stages, num_rounds].
      patterns: the distinct sets of messages of a tick.
      pattern: int32 [num_ticks], the index in `patterns` of each tick.
      num_inbox, num_residuals, num_stashes: numbers of slots; the largest number that a stage needs.
      splits: whether the schedule has W apart from B; else each W is in the tick after its B.
    """

    rows: TableRow
    patterns: tuple[Pattern, ...]
    pattern: np.ndarray
    num_inbox: int
    num_residuals: int
    num_stashes: int
    splits: bool

    @property
    def num_ticks(self) -> int:
        return len(self.rows.kind)

    @property
    def num_rounds(self) -> int:
        """The most messages that a stage receives in a tick from other stages: at most two."""
        return self.rows.received.shape[-1]

    @property
    def pattern_counts(self) -> list[int]:
        """The number of ticks with each pattern."""
        return np.bincount(self.pattern, minlength=len(self.patterns)).tolist()

    @property
    def num_messages(self) -> int:
        """The number of messages that all stages send to others."""
        num_pairs = [sum(map(len, pattern)) for pattern in self.patterns]
        return sum(count * pairs for count, pairs in zip(self.pattern_counts, num_pairs, strict=True))


def tick_table(orders: list[Order], schedule: Schedule) -> ScheduleTable:
    """The table of orders that are complete and do not deadlock.

    >>> from meshpar.parallel.pipeline.schedule import OneFOneB
    >>> ticks = tick_table(OneFOneB(num_microbatches=8).orders(4), OneFOneB(num_microbatches=8))
    >>> ticks.num_ticks, ticks.num_residuals
    (30, 4)
    """
    return _Table(orders, schedule).ticks()


def in_ticks(orders: list[Order], schedule: Schedule, times: OpTimes | None = None) -> Timeline:
    """When each operation runs, with W apart from B. Default times: every operation lasts one tick."""
    v = float(schedule.chunks_per_stage)
    return timeline([split_backwards(order) for order in orders], schedule, times or OpTimes(v, v, v))


def split_backwards(order: Order) -> Order:
    """The order with each B followed by its W, unless it has W already."""
    if splits([order]) or not any(op.kind == "B" for op in order):
        return order
    out: Order = []
    for op in order:
        out.append(op)
        if op.kind == "B":
            out.append(Op("W", *op[1:]))
    return out


class _Table:
    def __init__(self, orders: list[Order], schedule: Schedule):
        self.route = Route(schedule, len(orders))
        self.num_stages = len(orders)
        self.splits = splits(orders)
        self.ran = in_ticks(orders, schedule).ran
        self.tick = {(one.stage, one.op): round(one.start) for one in self.ran}
        self.num_ticks = max(self.tick.values()) + 1

    def ticks(self) -> ScheduleTable:
        sent = {self._receiver(stage, op): tick for (stage, op), tick in self.tick.items()}
        # A message takes a slot of its receiver from its arrival to its use.
        inbox = [(tick + 1, self.tick[to], to) for to, tick in sent.items() if to is not None and to in self.tick]
        residuals = [(self.tick[s, op], self._end(s, op), (s, op[1:])) for s, op in self.tick if op.kind == "F"]
        stashes = [(self.tick[s, op], self._end(s, op), (s, op[1:])) for s, op in self.tick if op.kind == "B"]
        slots = [_slots(spans) for spans in (inbox, residuals, stashes)]
        counts = [max([slot + 1 for slot in found.values()], default=0) for found in slots]
        rows = TableRow(*(np.zeros((self.num_ticks, self.num_stages), np.int32) for _ in TableRow._fields))
        rows.own[:] = counts[0]
        for one in self.ran:
            self._fill(rows, one, *slots)
        received, of_ticks = self._messages(slots[0], counts[0])
        patterns = tuple(dict.fromkeys(of_ticks))
        pattern = np.array([patterns.index(one) for one in of_ticks], np.int32)
        return ScheduleTable(rows._replace(received=received), patterns, pattern, *counts, splits=self.splits)

    def _messages(self, inbox: _Found, unused: int) -> tuple[np.ndarray, list[Pattern]]:
        """The slots [tick, stage, round] of the messages between stages, and the pattern of each tick."""
        sources: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # (tick, target) -> (source, slot)
        for (stage, op), tick in sorted(self.tick.items()):
            to = self._receiver(stage, op)
            if to in inbox and to[0] != stage:
                sources[tick, to[0]].append((stage, inbox[to]))
        num_rounds = max(map(len, sources.values()), default=0)
        received = np.full((self.num_ticks, self.num_stages, num_rounds), unused, np.int32)
        pairs = [[[] for _ in range(num_rounds)] for _ in range(self.num_ticks)]
        for (tick, target), messages in sources.items():
            for round_, (source, slot) in enumerate(messages):
                received[tick, target, round_] = slot
                pairs[tick][round_].append((source, target))
        return received, [tuple(tuple(sorted(round_)) for round_ in rounds) for rounds in pairs]

    def _fill(self, rows: TableRow, one: TimedOp, inbox: _Found, residuals: _Found, stashes: _Found) -> None:
        t = round(one.start)
        s = one.stage
        op = one.op
        virtual = self.route.virtual(s, op.chunk)
        rows.kind[t, s] = KINDS[op.kind]
        rows.microbatch[t, s] = op.microbatch
        rows.chunk[t, s] = op.chunk
        rows.first[t, s] = virtual == 0
        rows.last[t, s] = virtual == len(self.route.stages) - 1
        rows.inbox[t, s] = inbox.get((s, op), 0)
        rows.residual[t, s] = residuals[s, op[1:]]
        rows.stash[t, s] = stashes.get((s, op[1:]), 0)
        if (to := self._receiver(s, op)) in inbox and to[0] == s:
            rows.own[t, s] = inbox[to]

    def _receiver(self, stage: int, op: Op) -> tuple[int, Op] | None:
        """The operation that needs the output of `op`: on the next chunk, the previous one, or its own B at the end."""
        virtual = self.route.virtual(stage, op.chunk)
        last = len(self.route.stages) - 1
        if op.kind == "W" or (op.kind == "B" and virtual == 0):
            return None
        if op.kind == "F" and virtual == last:
            return stage, Op("B", *op[1:])
        to = virtual + (1 if op.kind == "F" else -1)
        return self.route.stages[to], Op(op.kind, op.microbatch, to // self.num_stages)

    def _end(self, stage: int, op: Op) -> int:
        return self.tick.get((stage, Op("W", *op[1:])), self.tick[stage, op])


_Found = dict[tuple[int, tuple], int]


def _slots(spans: Iterable[tuple[int, int, tuple[int, tuple]]]) -> _Found:
    """Assigns each span of ticks [first, last] the lowest slot that is free on its stage."""
    busy: dict[int, list[int]] = defaultdict(list)  # stage -> the last tick of each slot
    found: _Found = {}
    for first, last, key in sorted(spans):
        ends = busy[key[0]]
        slot = next((i for i, end in enumerate(ends) if end < first), len(ends))
        ends[slot : slot + 1] = [last]
        found[key] = slot
    return found
