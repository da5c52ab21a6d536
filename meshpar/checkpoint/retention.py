"""Configures how often a run writes checkpoints, and which of them it keeps."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from meshpar.config import Config, Count, Positive
from meshpar.regular_files import stored

WRITTEN = ("s3", "gs", "file")
"""Schemes of the stores to which runs are copied."""

HIGHEST = ("accuracy", "top_", "f1", "auc", "r2", "recall_at_")
"""Beginnings of the names of metrics of which a higher value is better."""


def with_best(data: Any) -> Any:
    """The keys of a section with `metric` and `best`; where `best` is not given, the name of the metric may say it."""
    named = isinstance(data, dict) and "best" not in data and str(data.get("metric")).startswith(HIGHEST)
    return data | {"best": "highest"} if named else data


class Retention(Config):
    """How often a checkpoint is written, and which are kept: the latest and the best.

    >>> sorted(Retention(keep=1, keep_best=2).chosen({1: 3.0, 2: 2.0, 3: 2.5, 4: None, 5: float("nan")}))
    [2, 3, 5]
    """

    shorthand: ClassVar[str | None] = "every"

    every: Positive | None = None
    """Steps between checkpoints. Default: only by time, and at the end."""
    every_minutes: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] | None = 15.0
    """Minutes between checkpoints; null for no checkpoints by time."""
    memory_every: Positive | None = None
    """Steps between copies in the memory of the hosts, from which a run resumes after a process or a host is lost."""
    keep: Positive = 2
    """How many of the latest checkpoints to keep."""
    keep_best: Count = 0
    """How many of the best checkpoints by `metric` to keep in addition."""
    metric: str = "loss"
    """The metric by which checkpoints are ranked."""
    best: Literal["lowest", "highest"] = "lowest"
    """Which value of the metric is the best. Default: the highest of `accuracy`, `top_5`, `f1`, `auc`, `r2` and
    `recall_at_1`, else the lowest."""
    mirror: str | None = None
    """An address such as `s3://bucket/run`, to which the directory is copied after each checkpoint, and from which an
    empty directory goes on. Needs s3fs or gcsfs."""

    _best = pydantic.model_validator(mode="before")(with_best)

    @pydantic.field_validator("mirror")
    @classmethod
    def _is_address(cls, mirror: str | None) -> str | None:
        if mirror is not None and not (stored(mirror) and mirror.partition(":")[0] in WRITTEN):
            known = ", ".join(f"{scheme}://" for scheme in WRITTEN)
            raise ValueError(f"{mirror} is no address of a store that can be written: {known}")
        return mirror

    def without_end(self) -> Retention:
        """A copy that keeps every checkpoint.

        >>> sorted(Retention(keep=1).without_end().chosen({1: None, 2: None}))
        [1, 2]
        """
        return self.model_copy(update={"keep": sys.maxsize})

    def ranked(self, metrics: Mapping[int, float | None]) -> list[int]:
        """Steps from best to worst, ties latest first; steps whose metric is None or NaN are left out."""
        sign = 1 if self.best == "lowest" else -1
        known = {step: sign * value for step, value in metrics.items() if value is not None and value == value}
        return sorted(known, key=lambda step: (known[step], -step))

    def chosen(self, metrics: Mapping[int, float | None]) -> set[int]:
        """The steps to keep.

        Args:
          metrics: step of each checkpoint -> its metric; None where there was no evaluation.
        """
        return {*sorted(metrics)[-self.keep :], *self.ranked(metrics)[: self.keep_best]}
