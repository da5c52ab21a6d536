"""The differences between two checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshpar.checkpoint.saved import Checkpoint
from meshpar.config import changed

BLOCK = 2**20
"""Elements compared at a time, as float64."""


@dataclass(frozen=True)
class ChangedArray:
    """An array that differs between two checkpoints.

    Args:
      before, after: dtype and shape; None where the array is missing.
      num_different: elements that differ; this and the next two are None where the shapes differ.
      largest: the largest absolute difference; NaN where either value is NaN.
      relative: `largest` over the largest absolute value before.
    """

    path: str
    before: str | None
    after: str | None
    num_different: int | None = None
    largest: float | None = None
    relative: float | None = None


@dataclass(frozen=True)
class Difference:
    """The differences from one checkpoint to another.

    Args:
      folders, steps: of the two checkpoints.
      config: dotted key -> the two values.
      arrays: the arrays that differ.
      num_same: the number of arrays that are equal.
    """

    folders: tuple[str, str]
    steps: tuple[int, int]
    config: dict[str, list[Any]]
    arrays: list[ChangedArray]
    num_same: int

    def as_json(self) -> dict[str, Any]:
        """JSON data for programs; numbers that are not finite are null."""
        data = asdict(self)
        for change in data["arrays"]:
            for name, value in change.items():
                if isinstance(value, float) and not np.isfinite(value):
                    change[name] = None
        return data


def difference(before: Checkpoint, after: Checkpoint) -> Difference:
    """Compares two checkpoints, array by array.

    Raises:
      CheckpointError: a file of either checkpoint is damaged.

    Memory: twice the largest array.
    """
    paths = sorted(before.described.keys() | after.described.keys())
    changes = [change for path in paths if (change := _change(before, after, path))]
    return Difference(
        (str(before.folder), str(after.folder)),
        (before.step, after.step),
        changed(before.meta["config"], after.meta["config"]),
        changes,
        len(paths) - len(changes),
    )


def _change(before: Checkpoint, after: Checkpoint, path: str) -> ChangedArray | None:
    old = before.described.get(path)
    new = after.described.get(path)
    shapes = [saved.meta["arrays"].get(path, {}).get("shape") for saved in (before, after)]
    if old is None or new is None or shapes[0] != shapes[1]:
        return ChangedArray(path, old, new)
    found = _compare(before.on_host(path), after.on_host(path))
    return ChangedArray(path, old, new, *found) if found[0] or old != new else None


def _compare(before: np.ndarray, after: np.ndarray) -> tuple[int, float, float]:
    """The number of different elements, the largest difference, and its ratio to the largest value before."""
    num_different = 0
    largest = 0.0
    scale = 0.0
    for start in range(0, before.size, BLOCK):
        old, new = (x.reshape(-1)[start : start + BLOCK].astype(np.float64) for x in (before, after))
        same = (old == new) | (np.isnan(old) & np.isnan(new))
        num_different += int((~same).sum())
        with np.errstate(invalid="ignore"):  # inf - inf
            difference = np.abs(np.where(same, 0.0, new - old))
        largest = np.maximum(largest, difference.max(initial=0.0))
        scale = np.fmax(scale, np.abs(old).max(initial=0.0))
    return num_different, float(largest), float(largest / scale) if scale else float(largest)
