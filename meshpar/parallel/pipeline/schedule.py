"""Pipeline schedules as data: for each stage, the order of its F, B and W.

A model is cut into p v virtual stages; each of p stages holds v of them as its chunks. F is the forward of a
microbatch on a chunk, B the backward with respect to its input, W the backward with respect to its weights. In a
schedule without W, B is both. A schedule specifies only orders; `simulate` computes when each operation runs, and how
many activations are held.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

import pydantic

from meshpar.config import Coerced, Config, FilePath, Positive, default, read_text
from meshpar.errors import ConfigError, Problems, ScheduleError

MAX_OPERATIONS = 2**15
"""The limit of forwards on all stages. Python takes some seconds to order that many."""


class Op(NamedTuple):
    """One operation of a stage: `F3` on its only chunk, `F3.1` on its second."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        name = f"{self.kind}{self.microbatch}"
        return f"{name}.{self.chunk}" if self.chunk else name


Order = list[Op]


def each(kind: str, microbatches: range, chunk: int = 0) -> Order:
    """The operation `kind` for each microbatch.

    >>> [str(op) for op in each("F", range(3))]
    ['F0', 'F1', 'F2']
    """
    return [Op(kind, j, chunk) for j in microbatches]


def one_by_one(forward: Order, backward: Order, warm_up: int) -> Order:
    """`warm_up` operations of `forward`, then one of each in turn, then the rest of `backward`."""
    steady = len(forward) - warm_up
    pairs = [op for pair in zip(forward[warm_up:], backward[:steady], strict=True) for op in pair]
    return forward[:warm_up] + pairs + backward[steady:]


def zero_bubble(num_microbatches: int, warm_up: int, delay: int) -> Order:
    """`warm_up` F, then B, W and F in turn, where W follows its B `delay` microbatches later."""
    m = num_microbatches
    order = each("F", range(min(warm_up, m)))
    for j in range(m):
        order.append(Op("B", j))
        if j >= delay:
            order.append(Op("W", j - delay))
        if j + warm_up < m:
            order.append(Op("F", j + warm_up))
    return order + each("W", range(max(0, m - delay), m))


class Schedule(Config):
    """The settings of every schedule.

    Subclasses implement `order`.
    """

    num_microbatches: Positive
    """The parts of a batch, which follow each other through the stages."""
    chunks: ClassVar[int] = 1
    is_stale: ClassVar[bool] = False
    """Whether gradients are computed at the weights before the last update."""
    cut: Coerced[tuple[Positive, ...] | None, list[int]] = default(None)
    """The number of layers of each virtual stage. Default: as even as possible, longer ones first."""

    def order(self, stage: int, num_stages: int) -> Order:
        """The operations of `stage`, first to last."""
        raise NotImplementedError

    def orders(self, num_stages: int) -> list[Order]:
        return [self.order(stage, num_stages) for stage in range(num_stages)]

    @property
    def chunks_per_stage(self) -> int:
        return self.chunks

    def stage_of(self, virtual: int, num_stages: int) -> int:
        """The stage that holds a virtual stage, as its chunk `virtual // num_stages`."""
        return virtual % num_stages

    def check(self, num_stages: int, problems: Problems) -> None:
        """Adds a problem for each reason why the schedule cannot run on `num_stages` stages."""
        operations = num_stages * self.num_microbatches * self.chunks_per_stage
        if operations > MAX_OPERATIONS:
            what = f"the schedule has {operations} forwards on all stages; the limit is {MAX_OPERATIONS}"
            problems.add("parallel.pipeline.num_microbatches", what, "fewer microbatches, stages or chunks")


class GPipe(Schedule):
    """All forwards, then all backwards; holds m activations. Source: Huang et al. 2018, arXiv:1811.06965."""

    kind: Literal["gpipe"] = "gpipe"

    def order(self, stage: int, num_stages: int) -> Order:
        return each("F", range(self.num_microbatches)) + each("B", range(self.num_microbatches))


class OneFOneB(Schedule):
    """One forward, one backward: a stage holds the activations of at most p microbatches, for any m.

    Source: Narayanan et al. 2021, arXiv:2006.09503 (PipeDream-Flush).
    """

    kind: Literal["1f1b"] = "1f1b"

    def order(self, stage: int, num_stages: int) -> Order:
        m = self.num_microbatches
        return one_by_one(each("F", range(m)), each("B", range(m)), min(num_stages - 1 - stage, m))


class Interleaved(Schedule):
    """1F1B with v chunks per stage, assigned round robin: 1/v of the bubble, v times the transfers.

    Source: Narayanan et al. 2021, arXiv:2104.04473.
    """

    kind: Literal["interleaved"] = "interleaved"
    num_chunks: Annotated[Positive, pydantic.Field(ge=2, le=1024)] = 2
    """Parts of the model on each stage."""

    @property
    def chunks_per_stage(self) -> int:
        return self.num_chunks

    def order(self, stage: int, num_stages: int) -> Order:
        p = num_stages
        v = self.num_chunks
        m = self.num_microbatches
        turns = [
            (j, chunk)
            for first in range(0, m, p) for chunk in range(v) for j in range(first, first + p)
        ]  # fmt: skip
        forward = [Op("F", j, chunk) for j, chunk in turns]
        backward = [Op("B", j, v - 1 - chunk) for j, chunk in turns]
        return one_by_one(forward, backward, min(2 * (p - 1 - stage) + (v - 1) * p, m * v))

    def check(self, num_stages: int, problems: Problems) -> None:
        super().check(num_stages, problems)
        if self.num_microbatches % num_stages:
            what = f"{self.num_microbatches} is not a multiple of the {num_stages} stages, which interleaved needs"
            below = self.num_microbatches // num_stages * num_stages
            near = [n for n in (below, below + num_stages) if n]
            fix = " or ".join(f"parallel.pipeline.num_microbatches={n}" for n in near)
            other = f"parallel.pipeline={{kind: 1f1b, num_microbatches: {self.num_microbatches}}}"
            problems.add("parallel.pipeline.num_microbatches", what, f"{fix}, or {other}")


class ZeroBubbleH1(Schedule):
    """1F1B whose W fill a part of the bubble: a third of it remains, at the same memory.

    Source: Qi et al. 2023, arXiv:2401.10241.
    """

    kind: Literal["zb_h1"] = "zb_h1"

    def order(self, stage: int, num_stages: int) -> Order:
        return zero_bubble(self.num_microbatches, num_stages - stage, stage)


class ZeroBubbleH2(Schedule):
    """Zero-bubble H1 with more forwards first, which fill the rest of the bubble; holds 2p - 1 activations.

    Source: Qi et al. 2023, arXiv:2401.10241.
    """

    kind: Literal["zb_h2"] = "zb_h2"

    def order(self, stage: int, num_stages: int) -> Order:
        return zero_bubble(self.num_microbatches, 2 * (num_stages - stage) - 1, 2 * stage)


class ZBV(Schedule):
    """Two chunks per stage, placed like a V, so that the first stage has the first and the last: p held, no bubble.

    Source: Qi et al. 2024, arXiv:2405.15362.
    """

    kind: Literal["zbv"] = "zbv"
    chunks: ClassVar[int] = 2

    def stage_of(self, virtual: int, num_stages: int) -> int:
        return min(virtual, 2 * num_stages - 1 - virtual)

    def order(self, stage: int, num_stages: int) -> Order:
        p = num_stages
        i = stage
        m = max(self.num_microbatches, 2 * p - 1)
        down = 2 * p - i - 1  # forwards of the first chunk before the first backward; i of the second
        order = each("F", range(down - i))
        order += [op for j in range(i) for op in (Op("F", j, 1), Op("F", j + down - i))]
        order += [op for j in range(p - i) for op in (Op("F", i + j, 1), Op("B", j, 1), Op("W", j, 1))]
        for j in range(m - p):
            if down + j < m:
                order.append(Op("F", down + j))
            order += [Op("B", j), Op("W", j)]
            order += [Op("F", p + j, 1), Op("B", p - i + j, 1), Op("W", p - i + j, 1)]
        order += [op for j in range(i) for op in (Op("B", m - p + j), Op("B", m - i + j, 1))]
        order += [op for j in range(p - i) for op in (Op("B", m - p + i + j), Op("W", m - p + j))]
        order += each("W", range(m - i, m), 1) + each("W", range(m - i, m))
        return [op for op in order if op.microbatch < self.num_microbatches]


class PipeDream2BW(OneFOneB):
    """1F1B with gradients at weights that are one step old; stores two versions. Source: arXiv:2006.09503.

    It changes the optimizer, not the order: w[t+1] = w[t] - update(gradient at w[t-1]). PipeDream uses this to start a
    step before the last one has ended. A step of meshpar is one program, which ends when all stages have ended. So it
    computes what PipeDream-2BW computes, in the time of 1F1B.
    """

    is_stale: ClassVar[bool] = True
    kind: Literal["pipedream_2bw"] = "pipedream_2bw"  # pyright: ignore[reportIncompatibleVariableOverride]


class ScheduleFile(Schedule):
    """Orders from a text file, one line per stage, such as `F0 F1 B0 W0 B1 W1`; `F0.1` is on chunk 1."""

    kind: Literal["written"] = "written"
    path: FilePath
    """The local text file, relative to the working directory."""
    num_chunks: Positive = 1
    """Parts of the model on each stage."""
    fold: bool = False
    """Whether chunks are placed like a V; else round robin."""

    @property
    def chunks_per_stage(self) -> int:
        return self.num_chunks

    def stage_of(self, virtual: int, num_stages: int) -> int:
        chunk, stage = divmod(virtual, num_stages)
        return num_stages - 1 - stage if self.fold and chunk % 2 else stage

    def order(self, stage: int, num_stages: int) -> Order:
        return self.orders(num_stages)[stage]

    def orders(self, num_stages: int) -> list[Order]:
        """Raises ScheduleError: the file cannot be read, or has another number of stages."""
        try:
            lines = [line.split("#")[0] for line in read_text(self.path).splitlines()]
        except ConfigError as error:
            raise ScheduleError(f"parallel.pipeline.path: {error}") from None
        return parse([line for line in lines if line.strip()], num_stages)


def parse(lines: Sequence[str], num_stages: int) -> list[Order]:
    """Parses orders from text, one line per stage.

    Raises:
      ScheduleError: lists each word that is not an operation; or the number of lines is wrong.

    >>> parse(["F0 B0"], 1)
    [[Op(kind='F', microbatch=0, chunk=0), Op(kind='B', microbatch=0, chunk=0)]]
    """
    problems = Problems()
    if len(lines) != num_stages:
        what = f"orders of {len(lines)} stages, but there are {num_stages}"
        problems.add("parallel.pipeline.path", what, "write one line for each stage")
    for number, line in enumerate(lines):
        wrong = [word for word in line.split() if not _OP.fullmatch(word)]
        if wrong:
            what = f"not an operation: {', '.join(wrong)}"
            problems.add(f"stage {number}", what, "F, B or W and a number: F0, B3, W2.1")
    problems.raise_any(ScheduleError, "the orders cannot be read:")
    matches = [[_OP.fullmatch(word) for word in line.split()] for line in lines]
    return [[Op(m[1], int(m[2]), int(m[3] or 0)) for m in line if m] for line in matches]


_OP = re.compile(r"([FBW])([0-9]{1,6})(?:\.([0-9]{1,6}))?")

Pipeline = Annotated[
    GPipe | OneFOneB | Interleaved | ZeroBubbleH1 | ZeroBubbleH2 | ZBV | PipeDream2BW | ScheduleFile,
    pydantic.Field(discriminator="kind"),
]
