"""Compares predictions with throughput and memory that others measured and published, row by row.

What differs between a source's stack and the planner's figures (kernels, the power limit) is one factor for products
and one for links. They are fitted to the rows of the source that are not held out, or with fewer than four rows only
the one for products. Each row is also predicted by the factors that the other rows give; a source's only row by no
factor.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from meshpar.cost.flat import size_of
from meshpar.cost.live import peak_bytes
from meshpar.cost.traced import Collective
from meshpar.errors import MeshparError, Problems, RunError
from meshpar.experiment.config import Run
from meshpar.experiment.prepare import Prepared, prepare
from meshpar.inspection.report.table import table
from meshpar.mesh import targets
from meshpar.planning.estimate import Work, work_of
from meshpar.planning.machine import StatedMachine
from meshpar.planning.published_file import Published, Ratio, Row, Source, read
from meshpar.planning.torch_ring import around_a_ring
from meshpar.tree import human_time

FOR_LINKS = 4
"""From so many rows on, the factor of links is fitted too."""
LOGIT_BYTES = 8
"""What meshpar's loss holds for a logit at its peak: the exponential (4), two masks, and the gradient (2)."""
_STEPS = (10, 3, 1)
"""Steps of the search for factors, in hundredths of a logarithm."""


@dataclass(frozen=True)
class Factors:
    """How much faster than the planner's figures a source's products and links are."""

    products: float = 1.0
    links: float = 1.0

    def on(self, machine: StatedMachine) -> StatedMachine:
        return machine.scaled(self.products, self.links)

    def __str__(self) -> str:
        return f"products {self.products:.2f}, links {self.links:.2f}"


@dataclass(frozen=True, eq=False)
class Measured:
    """A row with the work of its traced step.

    Args:
      num_layers: of the source's model; the traced one may have more.
    """

    source: Source
    row: Row
    run: Run
    machine: StatedMachine
    work: Work
    num_layers: int

    @property
    def tokens(self) -> float:
        """Tokens of a step and device."""
        return self.run.data.batch_size * self.run.data.seq_len / self.machine.num_devices

    @cached_property
    def published_s(self) -> float:
        """Seconds of a step, as published."""
        row = self.row
        if row.tokens_per_s:
            return self.tokens / row.tokens_per_s
        if row.step_s:
            return row.step_s
        assert row.teraflops, f"{row.name} has a time"
        return _flops(self.run, row.counted, self.num_layers) / (self.machine.num_devices * 1e12 * row.teraflops)

    def predicted_s(self, factors: Factors) -> float:
        if factors not in self._predicted:
            self._predicted[factors] = self.work.on(factors.on(self.machine)).total_s
        return self._predicted[factors]

    @cached_property
    def _predicted(self) -> dict[Factors, float]:
        return {}

    def error(self, factors: Factors) -> float:
        """The predicted tokens a second over the published ones, minus 1."""
        return self.published_s / self.predicted_s(factors) - 1

    @property
    def memory_gib(self) -> float:
        return (self.work.states_bytes + self.work.step_bytes) / 2**30


def _flops(run: Run, counted: str, layers: int) -> float:
    """Operations of a step by a source's formula."""
    model: Any = run.model
    tokens = run.data.batch_size * run.data.seq_len
    hidden, seq, vocab = model.hidden_size, run.data.seq_len, model.vocab_size
    if counted == "megatron":
        inside = 1 + seq / (6 * hidden) + vocab / (16 * layers * hidden)
        return 96.0 * tokens * layers * hidden**2 * inside
    kv = getattr(model, "num_kv_heads", None) or model.num_heads
    each = 2 * hidden**2 * (1 + kv / model.num_heads) + 3 * hidden * model.intermediate_size
    return tokens * (6 * (layers * each + hidden * vocab) + 6 * layers * seq * hidden)


@dataclass(frozen=True, eq=False)
class Compared:
    """A source's rows beside predictions.

    Args:
      factors: fitted to all rows that are not held out.
      without: row -> the factors of the others of them.
    """

    source: Source
    rows: Sequence[Measured]
    factors: Factors
    without: Mapping[str, Factors]

    @property
    def took(self) -> tuple[float, float]:
        """The least and the largest of the published steps over their estimates without factors."""
        every = [row.published_s / row.predicted_s(Factors()) for row in self.rows]
        return min(every), max(every)


@dataclass(frozen=True)
class Comparison:
    """All published rows beside predictions.

    Args:
      failed: row that could not be traced -> why.
    """

    compared: Sequence[Compared]
    ratios: Sequence[Ratio]
    failed: Mapping[str, str] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[Measured, Factors, Factors]]:
        """Each row, the factors of its source, and those of its source's other rows."""
        for one in self.compared:
            for row in one.rows:
                yield row, one.factors, one.without[row.row.name]

    @property
    def errors(self) -> dict[str, float]:
        """Row -> the error of its tokens a second."""
        return {row.row.name: row.error(factors) for row, factors, _ in self.rows()}

    @property
    def left_out(self) -> dict[str, float]:
        """Row -> the error of its tokens a second by the factors of the other rows."""
        return {row.row.name: row.error(factors) for row, _, factors in self.rows()}

    @property
    def memory(self) -> dict[str, float]:
        """Row -> the error of its memory, where that was published."""
        rows = [row for row, *_ in self.rows() if row.row.memory_gib]
        return {row.row.name: row.memory_gib / (row.row.memory_gib or 1) - 1 for row in rows}

    @property
    def of_ratios(self) -> dict[str, tuple[float, float]]:
        """Name -> the published ratio of tokens a second, and the predicted one."""
        both = {
            row.row.name: (row.tokens / row.published_s, row.tokens / row.predicted_s(f)) for row, f, _ in self.rows()
        }
        found = {}
        for one in self.ratios:
            over, under = (both[name] for name in one.rows)
            found[one.name] = (over[0] / under[0], over[1] / under[1])
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "factors": {one.source.name: vars(one.factors) for one in self.compared},
            "took": {one.source.name: one.took for one in self.compared},
            "errors": self.errors,
            "left_out": self.left_out,
            "memory": self.memory,
            "ratios": {name: {"published": a, "predicted": b} for name, (a, b) in self.of_ratios.items()},
            "failed": dict(self.failed),
        }

    def check(self) -> None:
        """Checks that every row was predicted.

        Raises:
          RunError: lists every row that could not be traced.
        """
        problems = Problems()
        for name, why in self.failed.items():
            problems.add(name, f"could not be traced: {why}", "mend its keys in docs/published.yaml")
        problems.raise_any(RunError, "plan --published lacks rows:")

    def __str__(self) -> str:
        head = ["", "published", "predicted", "", "left out", "GiB", "predicted", "", "where the time goes"]
        parts = []
        for one in self.compared:
            rows = [_row(row, one.factors, one.without[row.row.name]) for row in one.rows]
            least, most = one.took
            took = f"steps took {least:.2f} to {most:.2f} times the estimate without factors"
            parts.append(f"{one.source.name}: {one.factors}; {took} ({one.source.url})\n{table(head, rows)}")
        ratios = [[name, f"{a:.3f}", f"{b:.3f}", f"{b / a - 1:+.0%}"] for name, (a, b) in self.of_ratios.items()]
        parts += [table(["tokens a second", "published", "predicted", ""], ratios)] if ratios else []
        kinds = {"fitted": self.errors, "left out": self.left_out, "memory": self.memory}
        parts.append("\n".join(spread(what, errors) for what, errors in kinds.items() if errors))
        return "\n\n".join(parts)


def spread(what: str, errors: Mapping[str, float]) -> str:
    """The median and the largest error, without signs."""
    sizes = {name: abs(error) for name, error in errors.items()}
    worst = max(sizes, key=sizes.__getitem__)
    return f"{what}: median error {statistics.median(sizes.values()):.0%}, largest {sizes[worst]:.0%} ({worst})"


def _row(one: Measured, factors: Factors, others: Factors) -> list[str]:
    estimate = one.work.on(factors.on(one.machine))
    shares = {term: seconds / estimate.total_s for term, seconds in estimate.terms.items()}
    terms = ", ".join(f"{share:.0%} {term}" for term, share in shares.items() if share >= 0.005)
    gib = one.row.memory_gib
    return [
        one.row.name, human_time(one.published_s), human_time(estimate.total_s), f"{one.error(factors):+.0%}",
        f"{one.error(others):+.0%}", f"{gib:g}" if gib else "", f"{one.memory_gib:.1f}",
        f"{one.memory_gib / gib - 1:+.0%}" if gib else "", terms,
    ]  # fmt: skip


def compare(published: Published | None = None, names: Sequence[str] = ()) -> Comparison:
    """Predicts every published row.

    Args:
      names: of sources. Default: all.
    """
    published = published or read()
    compared = []
    failed: dict[str, str] = {}
    for source in published.sources:
        if names and source.name not in names:
            continue
        rows = [one for row in source.rows if (one := _tried(published, source, row, failed))]
        if not rows:
            continue
        known = [row for row in rows if not row.row.held_out]
        without = {row.row.name: fitted([other for other in known if other is not row]) for row in rows}
        compared.append(Compared(source, rows, fitted(known), without))
    known = {row.row.name for one in compared for row in one.rows}
    return Comparison(compared, [one for one in published.ratios if known.issuperset(one.rows)], failed)


def _tried(published: Published, source: Source, row: Row, failed: dict[str, str]) -> Measured | None:
    """A row with the work of its traced step. If it cannot be traced, the reason is added to `failed`."""
    try:
        return measured(published, source, row)
    except Exception as error:  # of any kind, as JAX raises them: the other rows are predicted all the same
        failed[row.name] = str(error) if isinstance(error, MeshparError) else f"{type(error).__name__}: {error}"
        return None


def measured(published: Published, source: Source, row: Row) -> Measured:
    """A row with the work of its traced step."""
    run = published.run(source, row)
    target = targets.parse(f"{source.chip}:{row.on}")
    machine = StatedMachine.of(target)
    if source.attention:
        machine = replace(machine, attention=source.attention * target.chip.flops)
    prepared = prepare(run, run.mesh.abstract(platform=machine.platform))
    work = work_of(prepared)
    assert work is not None, f"{row.name}: the trace says what is sent"
    if source.logit_bytes:
        work = replace(work, step_bytes=_reserved(source.logit_bytes, prepared))
    if source.gathers_8_bits and run.precision.matmul:
        work = replace(work, waits=[_in_8_bits(one) for one in work.waits])
    if source.ring:
        work = around_a_ring(work)
    num_layers = published.models[row.model]["num_layers"]
    return Measured(source, row, run, machine, work.overlapping() if row.overlaps else work, num_layers)


def _reserved(logit_bytes: Mapping[Literal["whole", "sharded"], int], prepared: Prepared) -> int:
    """Bytes of a step at its peak, with a source's bytes for each logit."""
    step = prepared.countable_step
    assert step is not None, "the trace says what is sent"
    model: Any = prepared.run.model
    shards = prepared.ctx.shards("vocab")
    each = logit_bytes["sharded" if shards > 1 else "whole"]

    def size(var: Any) -> int:
        is_of_logits = var.aval.ndim == 3 and var.aval.shape[-1] == model.vocab_size // shards
        return size_of(var) * each // LOGIT_BYTES if is_of_logits else size_of(var)

    return peak_bytes(step, size)


def _in_8_bits(one: Collective) -> Collective:
    """An all-gather of activations, in 8 bits instead of 16."""
    is_gather = one.axes == ("tensor",) and one.kind == "all_gather"
    return replace(one, full_bytes=one.full_bytes // 2) if is_gather else one


def fitted(rows: Sequence[Measured]) -> Factors:
    """The factors with the least sum of absolute errors' logarithms, which a few rows of another kind do not move."""
    at = (0, 0)  # hundredths of a logarithm
    ways = ((1, 0), (-1, 0), (0, 1), (0, -1)) if len(rows) >= FOR_LINKS else ((1, 0), (-1, 0))

    def loss(at: tuple[int, int]) -> tuple[float, float]:
        errors = [math.log(row.predicted_s(_factors(at)) / row.published_s) for row in rows]
        return round(sum(map(abs, errors)), 6), sum(error**2 for error in errors)

    for step in _STEPS:
        while True:
            near = [(at[0] + x * step, min(0, at[1] + y * step)) for x, y in ways]
            best = min([at, *near], key=loss)
            if best == at:
                break
            at = best
    return _factors(at)


def _factors(at: tuple[int, int]) -> Factors:
    return Factors(*(math.exp(one / 100) for one in at))
