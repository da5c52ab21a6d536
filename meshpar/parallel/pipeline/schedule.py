"""Pipeline schedules as data: for each stage, the order of its F, B and W.

A model is cut into p v virtual stages, of which each of p stages holds v chunks. F is the forward of a microbatch on
a chunk, B the backward with respect to its input, W that with respect to its weights. Where a schedule has no W, its B
is both. An order is all that a schedule says; `simulate` says when each operation runs, and what is held meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

import pydantic

from meshpar.config import Config, Positive, read_text
from meshpar.errors import ConfigError, Problems, ScheduleError

MAX_OPERATIONS = 2**15
"""Forwards of a schedule on all stages. They are put in order by Python, in some seconds for so many."""


class Op(NamedTuple):
    """One operation of a stage: `F3` on its only chunk, `F3.1` on its second."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + f".{self.chunk}" * bool(self.chunk)


Order = list[Op]


def each(kind: str, microbatches: range, chunk: int = 0) -> Order:
    """`kind` of each microbatch.

    >>> [str(op) for op in each("F", range(3))]
    ['F0', 'F1', 'F2']
    """
    return [Op(kind, j, chunk) for j in microbatches]


def one_by_one(forward: Order, backward: Order, warm_up: int) -> Order:
    """So many of `forward`, then one of each in turn, then the rest of `backward`."""
    steady = len(forward) - warm_up
    pairs = [op for pair in zip(forward[warm_up:], backward[:steady], strict=True) for op in pair]
    return forward[:warm_up] + pairs + backward[steady:]


def zero_bubble(num_microbatches: int, warm_up: int, delay: int) -> Order:
    """So many F, then B, W and F in turn, where W lags behind B by `delay` microbatches."""
    m, order = num_microbatches, each("F", range(min(warm_up, num_microbatches)))
    for j in range(m):
        order += [Op("B", j)]
        order += [Op("W", j - delay)] * (j >= delay)
        order += [Op("F", j + warm_up)] * (j + warm_up < m)
    return order + each("W", range(max(0, m - delay), m))


class Schedule(Config):
    """What every schedule has. Subclasses say `order`."""

    num_microbatches: Positive
    """A batch is computed in so many parts, which follow each other through the stages."""
    chunks: ClassVar[int] = 1
    is_stale: ClassVar[bool] = False
    """Whether gradients are taken at the weights before the last update."""
    cut: tuple[Positive, ...] | None = None
    """Layers of each virtual stage, first to last. Default: as even as it goes, the last ones the shorter."""

    def order(self, stage: int, num_stages: int) -> Order:
        """What `stage` does, first to last."""
        raise NotImplementedError

    def orders(self, num_stages: int) -> list[Order]:
        return [self.order(stage, num_stages) for stage in range(num_stages)]

    @property
    def chunks_per_stage(self) -> int:
        return self.chunks

    def stage_of(self, virtual: int, num_stages: int) -> int:
        """Where a virtual stage lies; it is chunk `virtual // num_stages` there."""
        return virtual % num_stages

    def check(self, num_stages: int, problems: Problems) -> None:
        """Adds what is wrong on so many stages."""
        operations = num_stages * self.num_microbatches * self.chunks_per_stage
        if operations > MAX_OPERATIONS:
            what = f"{operations} forwards on all stages, of which at most {MAX_OPERATIONS} are put in order"
            problems.add("parallel.pipeline.num_microbatches", what, "fewer microbatches, stages or chunks")


class GPipe(Schedule):
    """All forwards, then all backwards. Holds m activations. Source: Huang et al. 2018, arXiv:1811.06965."""

    kind: Literal["gpipe"] = "gpipe"

    def order(self, stage: int, num_stages: int) -> Order:
        return each("F", range(self.num_microbatches)) + each("B", range(self.num_microbatches))


class OneFOneB(Schedule):
    """One forward, one backward: a stage holds the activations of p microbatches, however many there are.

    Source: Narayanan et al. 2021, arXiv:2006.09503 (PipeDream-Flush).
    """

    kind: Literal["1f1b"] = "1f1b"

    def order(self, stage: int, num_stages: int) -> Order:
        m = self.num_microbatches
        return one_by_one(each("F", range(m)), each("B", range(m)), min(num_stages - 1 - stage, m))


class Interleaved(Schedule):
    """1F1B with v chunks a stage, dealt out like cards: a v-th of the bubble, for v times the transfers.

    Source: Narayanan et al. 2021, arXiv:2104.04473.
    """

    kind: Literal["interleaved"] = "interleaved"
    num_chunks: Annotated[Positive, pydantic.Field(ge=2, le=1024)] = 2

    @property
    def chunks_per_stage(self) -> int:
        return self.num_chunks

    def order(self, stage: int, num_stages: int) -> Order:
        p, v, m = num_stages, self.num_chunks, self.num_microbatches
        deal = lambda kind, chunk_of: [
            Op(kind, j, chunk_of(chunk))
            for first in range(0, m, p)
            for chunk in range(v)
            for j in range(first, first + p)
        ]
        warm_up = min(2 * (p - 1 - stage) + (v - 1) * p, m * v)
        return one_by_one(deal("F", lambda c: c), deal("B", lambda c: v - 1 - c), warm_up)

    def check(self, num_stages: int, problems: Problems) -> None:
        super().check(num_stages, problems)
        if self.num_microbatches % num_stages:
            what = f"{self.num_microbatches} microbatches go through {num_stages} stages in groups of {num_stages}"
            below = self.num_microbatches // num_stages * num_stages
            near = [n for n in (below, below + num_stages) if n]
            fix = " or ".join(f"parallel.pipeline.num_microbatches={n}" for n in near)
            other = f"parallel.pipeline={{kind: 1f1b, num_microbatches: {self.num_microbatches}}}"
            problems.add("parallel.pipeline.num_microbatches", what, f"{fix}, or {other}")


class ZeroBubbleH1(Schedule):
    """1F1B whose W fill a part of the bubble: a third of it remains, and no more is held.

    Source: Qi et al. 2023, arXiv:2401.10241.
    """

    kind: Literal["zb_h1"] = "zb_h1"

    def order(self, stage: int, num_stages: int) -> Order:
        return zero_bubble(self.num_microbatches, num_stages - stage, stage)


class ZeroBubbleH2(Schedule):
    """More forwards before the first backward fill the rest of the bubble; holds 2p - 1 activations.

    Source: Qi et al. 2023, arXiv:2401.10241.
    """

    kind: Literal["zb_h2"] = "zb_h2"

    def order(self, stage: int, num_stages: int) -> Order:
        return zero_bubble(self.num_microbatches, 2 * (num_stages - stage) - 1, 2 * stage)


class ZBV(Schedule):
    """Two chunks a stage, down and up again like a V, so that the last is where the first is: p held, no bubble.

    Source: Qi et al. 2024, arXiv:2405.15362.
    """

    kind: Literal["zbv"] = "zbv"
    chunks: ClassVar[int] = 2

    def stage_of(self, virtual: int, num_stages: int) -> int:
        return min(virtual, 2 * num_stages - 1 - virtual)

    def order(self, stage: int, num_stages: int) -> Order:
        p, i, m = num_stages, stage, max(self.num_microbatches, 2 * num_stages - 1)
        down, up = 2 * p - i - 1, i  # forwards of either chunk before the first backward
        order = each("F", range(down - i))
        order += [op for j in range(i) for op in (Op("F", j, 1), Op("F", j + down - i))]
        order += [op for j in range(p - i) for op in (Op("F", up + j, 1), Op("B", j, 1), Op("W", j, 1))]
        for j in range(m - p):
            order += [Op("F", down + j)] * (down + j < m) + [Op("B", j), Op("W", j)]
            order += [Op("F", p + j, 1), Op("B", p - i + j, 1), Op("W", p - i + j, 1)]
        order += [op for j in range(i) for op in (Op("B", m - p + j), Op("B", m - i + j, 1))]
        order += [op for j in range(p - i) for op in (Op("B", m - p + i + j), Op("W", m - p + j))]
        order += each("W", range(m - i, m), 1) + each("W", range(m - i, m))
        return [op for op in order if op.microbatch < self.num_microbatches]


class PipeDream2BW(OneFOneB):
    """1F1B on weights that are one step old, of which two versions are kept. Source: arXiv:2006.09503.

    It is another optimizer, not another order: w[t+1] = w[t] - update(gradient at w[t-1]). PipeDream needs that to
    begin a step before the last one has ended. A step of meshpar is one program, which ends when all stages have: so
    here it computes what PipeDream-2BW does, in the time of 1F1B.
    """

    is_stale: ClassVar[bool] = True
    kind: Literal["pipedream_2bw"] = "pipedream_2bw"  # pyright: ignore[reportIncompatibleVariableOverride]


class ScheduleFile(Schedule):
    """An order of one's own, from a text file: a line a stage, such as `F0 F1 B0 W0 B1 W1`; `F0.1` is on chunk 1."""

    kind: Literal["written"] = "written"
    path: Path
    num_chunks: Positive = 1
    fold: bool = False
    """Whether the second of two chunks goes back up, as a V; else the chunks are dealt out like cards."""

    @property
    def chunks_per_stage(self) -> int:
        return self.num_chunks

    def stage_of(self, virtual: int, num_stages: int) -> int:
        turn, stage = divmod(virtual, num_stages)
        return num_stages - 1 - stage if self.fold and turn % 2 else stage

    def order(self, stage: int, num_stages: int) -> Order:
        return self.orders(num_stages)[stage]

    def orders(self, num_stages: int) -> list[Order]:
        """Raises ScheduleError: the file cannot be read, or is of another number of stages."""
        try:
            lines = [line.split("#")[0] for line in read_text(self.path).splitlines()]
        except ConfigError as error:
            raise ScheduleError(f"parallel.pipeline.path: {error}") from None
        return parse([line for line in lines if line.strip()], num_stages)


def parse(lines: Sequence[str], num_stages: int) -> list[Order]:
    """Orders from text, a line a stage.

    Raises:
      ScheduleError: lists each word that is no operation, and lines too many or too few.

    >>> parse(["F0 B0"], 1)
    [[Op(kind='F', microbatch=0, chunk=0), Op(kind='B', microbatch=0, chunk=0)]]
    """
    problems = Problems()
    if len(lines) != num_stages:
        problems.add(
            "parallel.pipeline.path", f"orders of {len(lines)} stages, but there are {num_stages}", "a line a stage"
        )
    for number, line in enumerate(lines):
        wrong = [word for word in line.split() if not _OP.fullmatch(word)]
        if wrong:
            problems.add(f"stage {number}", f"no operation: {', '.join(wrong)}", "F, B or W and a number: F0, B3, W2.1")
    problems.raise_any(ScheduleError, "the orders cannot be read:")
    return [[_op(word) for word in line.split()] for line in lines]


def _op(word: str) -> Op:
    kind, microbatch, chunk = _OP.fullmatch(word).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return Op(kind, int(microbatch), int(chunk or 0))


_OP = re.compile(r"([FBW])([0-9]{1,6})(?:\.([0-9]{1,6}))?")

Pipeline = Annotated[
    GPipe | OneFOneB | Interleaved | ZeroBubbleH1 | ZeroBubbleH2 | ZBV | PipeDream2BW | ScheduleFile,
    pydantic.Field(discriminator="kind"),
]
