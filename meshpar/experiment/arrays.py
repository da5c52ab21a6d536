"""Arrays in memory, or a function of the step, as the batches of a training."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshpar.errors import ConfigError, Problems

Rows = Mapping[str, Any]
"""Name -> array; the first dim is the rows."""
Data = Rows | Callable[[int], Rows]
"""All rows; or a function: step, counted from 0 -> its batch. A run that resumes reads the batches of later steps."""


@dataclass(frozen=True)
class Batches:
    """Batches of rows in memory, by index.

    Args:
      rows: name -> array of all rows.
      seed: shuffles the rows, anew in each epoch, without end; None to read them once, in order.
    """

    rows: Mapping[str, np.ndarray]
    batch_size: int
    seed: int | None

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.rows.values())))

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._chosen(index, np.arange(self.batch_size))

    def batches(self, start: int = 0, rows: np.ndarray | None = None) -> Generator[dict[str, np.ndarray], None, None]:
        """The batches from `start` on, of which only the given rows are read."""
        chosen = np.arange(self.batch_size) if rows is None else rows
        index = start
        while self.seed is not None or index < self.num_rows // self.batch_size:
            yield self._chosen(index, chosen)
            index += 1

    def _chosen(self, index: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        epoch, place = np.divmod(index * self.batch_size + rows, self.num_rows)
        if self.seed is not None:
            for one in np.unique(epoch):
                order = np.random.default_rng((self.seed, int(one))).permutation(self.num_rows)
                place = np.where(epoch == one, order[place], place)
        return {name: x[place] for name, x in self.rows.items()}


@dataclass(frozen=True)
class Calls:
    """The batches that a function of the step returns."""

    function: Callable[[int], Rows]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: np.asarray(x) for name, x in self.function(index).items()}

    def batches(self, start: int = 0, rows: np.ndarray | None = None) -> Generator[dict[str, np.ndarray], None, None]:
        index = start
        while True:
            batch = self[index]
            yield batch if rows is None else {name: x[rows] for name, x in batch.items()}
            index += 1


def batches(data: Data, batch_size: int | None, seed: int) -> Batches | Calls:
    """The batches that a training reads.

    Raises:
      ConfigError: the size of a batch is missing or larger than the data, or the arrays have different numbers of rows.
    """
    problems = Problems()
    if callable(data):
        if batch_size is not None:
            problems.add("batch_size", "a function of the step returns whole batches", "no batch_size")
        problems.raise_any(ConfigError, "these arguments of fit are wrong:")
        return Calls(data)
    rows = {name: np.asarray(x) for name, x in data.items()}
    counts = {name: len(x) if x.ndim else 0 for name, x in rows.items()}
    if len({*counts.values()}) != 1 or not min(counts.values(), default=0):
        listed = ", ".join(f"{name} has {count} rows" for name, count in counts.items()) or "there are none"
        problems.add("data", f"its arrays need the same number of rows: {listed}", "the rows as their first dims")
    elif batch_size is None:
        problems.add("batch_size", "it is the number of rows of a step", f"batch_size={min(32, *counts.values())}")
    elif batch_size > min(counts.values()):
        problems.add("batch_size", f"{batch_size} is more than the {min(counts.values())} rows of data", "fewer rows")
    problems.raise_any(ConfigError, "these arguments of fit are wrong:")
    assert batch_size, "checked above"
    return Batches(rows, batch_size, seed)


def held_out_batches(data: Rows | None, batch_size: int) -> Batches | None:
    """The batches of an evaluation, in order.

    Raises:
      ConfigError: the rows cannot be cut into whole batches.
    """
    if data is None:
        return None
    rows = {name: np.asarray(x) for name, x in data.items()}
    count = len(next(iter(rows.values())))
    if not count or count % batch_size:
        what = f"its {count} rows cannot be cut into batches of {batch_size}"
        raise ConfigError(f"held_out: {what}; a multiple of {batch_size} rows")
    return Batches(rows, batch_size, None)
