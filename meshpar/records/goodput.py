"""Goodput: the fraction of a run's time in which it made progress."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshpar.records.loggers import Record


def goodput(records: Sequence[Record], now: datetime) -> float | None:
    """The time of all steps that count, over the time since the run first began; None before the first speed is known.

    It does not count compiling, restoring, evaluating, saving, the time between two attempts, and steps that a restart
    repeated, whose first records `read` excludes.

    >>> began = {"kind": "run", "step": 0, "began": "2026-01-01T00:00:00+00:00"}
    >>> steps = [{"kind": "train", "step": 1}, {"kind": "train", "step": 11, "step_s": 3.0}]
    >>> goodput([began, *steps], datetime.fromisoformat("2026-01-01T00:01:00+00:00"))
    0.5
    """
    began = next((record["began"] for record in records if "began" in record), None)
    steps = [record for record in records if record["kind"] == "train"]
    spent_s = [
        record["step_s"] * (record["step"] - before["step"]) for before, record in pairwise(steps) if "step_s" in record
    ]
    if began is None or not spent_s:
        return None
    elapsed_s = (now - datetime.fromisoformat(began)).total_seconds()
    return sum(spent_s) / elapsed_s if elapsed_s > 0 else None


def restarts(records: Sequence[Record]) -> int:
    """How many times the run began again."""
    return max(0, sum(record["kind"] == "run" for record in records) - 1)
