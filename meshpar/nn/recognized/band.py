"""Which masks attention cores compute without storing them: all keys, earlier keys, or a window of earlier keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshpar.nn.recognized.known import Known
from meshpar.nn.recognized.scores import Label


@dataclass(frozen=True)
class Band:
    """The keys that a query attends to.

    Args:
      is_causal: only those up to its own position; else all.
      window: how many of them, its own included; None for all.
    """

    is_causal: bool
    window: int | None = None

    def __str__(self) -> str:
        if not self.is_causal:
            return "all tokens"
        return "earlier tokens" if self.window is None else f"a window of {self.window} earlier tokens"


@dataclass(frozen=True)
class Unlike:
    """Why no core computes a mask.

    Args:
      why: the rest of a sentence that begins with "its mask".
    """

    why: str


def band(
    masks: Sequence[tuple[Known, tuple[Label | None, ...]]], queries: Sequence[Label], key: Label
) -> tuple[Band, Label | None] | Unlike:
    """The band of masks that hold together, and the label of the dim of queries that they vary along.

    Args:
      queries: the labels of the scores that only the queries have.
    """
    dims = set()
    for mask, labels in masks:
        dims |= {label for label, n in zip(labels, mask.shape, strict=True) if n > 1}
    rows = [label for label in queries if label in dims]
    if dims - {key, *rows} or len(rows) > 1:
        return Unlike("differs from row to row, or from head to head")
    if not dims:
        visible = all(bool(mask.values.all()) for mask, _ in masks)
        return (Band(is_causal=False), None) if visible else Unlike("hides all tokens")
    if not rows:
        return Unlike("hides the same keys from all queries")
    whole = _joined(masks, rows[0], key)
    found = _of(whole)
    return (found, rows[0]) if found else Unlike("is neither causal nor a window of earlier tokens")


def _joined(masks: Sequence[tuple[Known, tuple[Label | None, ...]]], row: Label, key: Label) -> np.ndarray:
    """bool[queries, keys]."""
    whole = np.ones((1, 1), bool)
    for mask, labels in masks:
        sizes = dict(zip(labels, mask.shape, strict=True))
        flat = mask.values.reshape(sizes.get(row, 1), sizes.get(key, 1))
        if row in labels and key in labels and labels.index(row) > labels.index(key):
            flat = mask.values.reshape(sizes[key], sizes[row]).T
        whole = whole & flat
    return whole


def _of(visible: np.ndarray) -> Band | None:
    if visible.all():
        return Band(is_causal=False)
    queries, keys = visible.shape
    if queries != keys:
        return None
    window = int(visible[-1].sum())
    distance = np.arange(queries)[:, None] - np.arange(keys)
    if not (visible == ((distance >= 0) & (distance < window))).all():
        return None
    return Band(is_causal=True, window=None if window == keys else window)
