"""What differs between two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshpar.checkpoint.saved import Saved
from meshpar.config import changed

BLOCK = 2**20
"""Elements that are compared at once: differences are float64."""


@dataclass(frozen=True)
class Change:
    """An array that is not the same.

    Args:
      before, after: type and shape; None where it is missing.
      num_different: elements that differ; None where shapes do, as for the next two.
      largest: the largest absolute difference; NaN where one of the two is.
      relative: that, over the largest absolute value before.
    """

    path: str
    before: str | None
    after: str | None
    num_different: int | None = None
    largest: float | None = None
    relative: float | None = None


@dataclass(frozen=True)
class Difference:
    """From one checkpoint to another.

    Args:
      folders, steps: of the two.
      config: dotted key -> the two values.
      arrays: those that are not the same.
      num_same: arrays that are equal.
    """

    folders: tuple[str, str]
    steps: tuple[int, int]
    config: dict[str, list[Any]]
    arrays: list[Change]
    num_same: int

    def as_json(self) -> dict[str, Any]:
        """For programs; numbers that are not finite are null."""
        finite = lambda value: None if isinstance(value, float) and not np.isfinite(value) else value
        arrays = [{name: finite(value) for name, value in asdict(change).items()} for change in self.arrays]
        return asdict(self) | {"arrays": arrays}


def difference(before: Saved, after: Saved) -> Difference:
    """Compares two checkpoints, array by array.

    Raises:
      CheckpointError: a file of one of them was changed.

    Memory: the largest array, twice.
    """
    old, new = before.described, after.described
    paths = sorted(old.keys() | new.keys())
    changes = [change for path in paths if (change := _change(before, after, path))]
    return Difference(
        (str(before.folder), str(after.folder)),
        (before.step, after.step),
        changed(before.meta["config"], after.meta["config"]),
        changes,
        len(paths) - len(changes),
    )


def _change(before: Saved, after: Saved, path: str) -> Change | None:
    old, new = before.described.get(path), after.described.get(path)
    shapes = [saved.meta["arrays"].get(path, {}).get("shape") for saved in (before, after)]
    if old is None or new is None or shapes[0] != shapes[1]:
        return Change(path, old, new)
    found = _compare(before.on_host(path), after.on_host(path))
    return Change(path, old, new, *found) if found[0] or old != new else None


def _compare(before: np.ndarray, after: np.ndarray) -> tuple[int, float, float]:
    """How many differ, by how much at most, and relative to the largest before."""
    num_different, largest, scale = 0, 0.0, 0.0
    for old, new in _blocks(before, after):
        same = (old == new) | (np.isnan(old) & np.isnan(new))
        num_different += int((~same).sum())
        with np.errstate(invalid="ignore"):  # inf - inf, where both are
            apart = np.abs(np.where(same, 0.0, new - old))
        largest = np.maximum(largest, apart.max(initial=0.0))
        scale = np.fmax(scale, np.abs(old).max(initial=0.0))
    return num_different, float(largest), float(largest / scale) if scale else float(largest)


def _blocks(*arrays: np.ndarray) -> Iterator[list[np.ndarray]]:
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, BLOCK):
        yield [array[start : start + BLOCK].astype(np.float64) for array in flat]
