"""What the runs of a sweep reached, from their records."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshpar.checkpoint.retention import HIGHEST
from meshpar.errors import ConfigError, suggestion
from meshpar.experiment.config import Run
from meshpar.inspection.report.table import table
from meshpar.records.file import FILE, read
from meshpar.sweep.grid import Point, text

LOWEST = ("loss", "perplexity", "mse", "rmse", "mae")
"""Beginnings of the names of metrics of which a lower value is better."""


def direction(metric: str, best: str | None) -> Literal["lowest", "highest"]:
    """Whether lower or higher values of a metric are better.

    Raises:
      ConfigError: it is not known.
    """
    if best:
        return "highest" if best == "highest" else "lowest"
    if metric.startswith(LOWEST):
        return "lowest"
    if metric.startswith(HIGHEST):
        return "highest"
    raise ConfigError(f"--metric {metric}: say which is better, --best lowest or --best highest")


@dataclass(frozen=True)
class Outcome:
    """What one run reached.

    Args:
      step: of its last record.
      metrics: of its last evaluation.
      why: why it failed; empty if it ended.
    """

    point: Point
    run_dir: Path
    step: int = 0
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        values = {"values": dict(self.point.values), "run_dir": str(self.run_dir), "step": self.step}
        return values | {"metrics": dict(self.metrics)} | ({"why": self.why} if self.why else {})


def ended(point: Point, run: Run) -> Outcome | None:
    """What a run reached that has ended; None if it has not, or if it was of another config."""
    file = run.run_dir / FILE
    records = read(file) if file.is_file() else []
    configs = [record["config"] for record in records if record["kind"] == "run"]
    if not configs or records[-1]["kind"] != "summary" or configs[-1] != json.loads(run.model_dump_json()):
        return None
    return Outcome(point, run.run_dir, records[-1]["step"], _evaluated(records))


def failed(point: Point, run: Run, why: str) -> Outcome:
    file = run.run_dir / FILE
    records = read(file) if file.is_file() else []
    step = max((record["step"] for record in records), default=0)
    return Outcome(point, run.run_dir, step, _evaluated(records), why)


def _evaluated(records: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    found = [record for record in records if record["kind"] == "evaluation"]
    return {name: value for name, value in found[-1].items() if name not in ("kind", "step")} if found else {}


@dataclass(frozen=True)
class Swept:
    """What the runs of a sweep reached, and which is the best."""

    outcomes: Sequence[Outcome]
    metric: str
    best: Literal["lowest", "highest"]

    def check(self) -> None:
        """Raises ConfigError if a run has ended that has no such metric."""
        for outcome in self.outcomes:
            if not outcome.why and self.metric not in outcome.metrics:
                names = [name for name in outcome.metrics if name != "tokens"]
                fix = suggestion(self.metric, names, f"there are {', '.join(names)}")
                raise ConfigError(f"--metric {self.metric}: the evaluation of {outcome.run_dir} has none; {fix}")

    @property
    def winner(self) -> Outcome | None:
        """The best of the runs that ended; None if none has a finite value."""
        found = [one for one in self.outcomes if not one.why and self._value(one) is not None]
        by_value = min if self.best == "lowest" else max
        return by_value(found, key=self._value, default=None)  # pyright: ignore

    def _value(self, outcome: Outcome) -> float | None:
        value = outcome.metrics.get(self.metric)
        return value if value is not None and math.isfinite(value) else None

    def as_json(self) -> dict[str, Any]:
        winner = self.winner
        runs = [outcome.as_json() for outcome in self.outcomes]
        found = {"metric": self.metric, "better": self.best, "best": winner and winner.as_json()}
        return found | {"runs": runs}

    def __str__(self) -> str:
        keys = list(self.outcomes[0].point.values)
        rows = [[*self._cells(one, keys), self._note(one)] for one in self.outcomes]
        return table([*keys, "step", self.metric, ""], rows)

    def _cells(self, outcome: Outcome, keys: Sequence[str]) -> list[str]:
        value = outcome.metrics.get(self.metric)
        shown = "-" if self.metric not in outcome.metrics else "not finite" if value is None else f"{value:.4f}"
        return [*(text(outcome.point.values[key]) for key in keys), str(outcome.step), shown]

    def _note(self, outcome: Outcome) -> str:
        return f"failed: {outcome.why}" if outcome.why else f"best: {outcome.run_dir}" if outcome is self.winner else ""
