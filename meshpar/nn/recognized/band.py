"""Which masks attention cores compute without storing them.

Those that are known when a program is traced are all keys, earlier keys, or a window of earlier keys. Those of the data
hide keys or queries, or separate the documents of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from meshpar.nn.recognized.known import Known
from meshpar.nn.recognized.masks import Base, Term, View
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


@dataclass(frozen=True, eq=False)
class Condition:
    """A mask of the data.

    Args:
      kind: `keys` are visible, or `queries` see, where an array is not 0; or `documents`: where the arrays of a query
        and of a key are equal.
      bases: the array; those of the queries and of the keys.
      labels: of the dims of each of them.
      is_negated: whether keys or queries are those where the array is 0.
    """

    kind: Literal["keys", "queries", "documents"]
    bases: tuple[Base, ...]
    labels: tuple[tuple[Label | None, ...], ...]
    is_negated: bool = False

    @property
    def is_of_tokens(self) -> bool:
        """Whether queries and keys are the same tokens, each of one document."""
        if self.kind != "documents" or self.bases[0] is not self.bases[1]:
            return False
        return sum(a != b for a, b in zip(*self.labels, strict=True)) == 1

    def __str__(self) -> str:
        return {"keys": "without hidden keys", "queries": "of visible queries", "documents": "of their own document"}[
            self.kind
        ]


@dataclass(frozen=True)
class Visible:
    """Which keys queries attend to.

    Args:
      band: what is known without data.
      conditions: what the data say.
      row: the label of the dim of queries along which either varies; None if neither does.
    """

    band: Band
    conditions: tuple[Condition, ...]
    row: Label | None


def visible(
    masks: Sequence[tuple[Known | Term, tuple[Label | None, ...]]], queries: Sequence[Label], key: Label
) -> Visible | Unlike:
    """What masks that hold together say.

    Args:
      queries: the labels of the scores that only the queries have.
    """
    conditions = []
    for term, labels in masks:
        if isinstance(term, Term):
            found = condition(term, labels, queries, key)
            if isinstance(found, Unlike):
                return found
            conditions.append(found)
    found = band([(mask, labels) for mask, labels in masks if isinstance(mask, Known)], queries, key)
    if isinstance(found, Unlike):
        return found
    kind, row = found
    rows = {row, *(x for one in conditions for labels in one.labels for x in labels if x in queries)} - {None}
    if len(rows) > 1:
        return Unlike("differs from head to head")
    return Visible(kind, tuple(conditions), next(iter(rows), None))


def condition(term: Term, labels: Sequence[Label | None], queries: Sequence[Label], key: Label) -> Condition | Unlike:
    """What one mask of the data says."""
    views = [view for view in term.views if isinstance(view, View)]
    of = [_base_labels(view, labels) for view in views]
    sides = ["".join(side for side, own in (("q", queries), ("k", [key])) if {*one} & {*own}) for one in of]
    bases = tuple(view.base for view in views)
    if len(views) == 1 and sides[0] != "qk":
        return Condition("queries" if sides[0] == "q" else "keys", bases, tuple(of), term.is_negated)
    if sorted(sides) == ["k", "q"] and not term.is_negated and all(_are_integers(base) for base in bases):
        order = (0, 1) if sides[0] == "q" else (1, 0)
        return Condition("documents", tuple(bases[i] for i in order), tuple(of[i] for i in order))
    return Unlike("depends on data for each pair of a query and a key")


def _are_integers(base: Base) -> bool:
    """Whether its numbers are those of int32."""
    dtype = np.dtype(base.var.aval.dtype)
    return dtype.kind in "iub" and (dtype.itemsize < 4 or dtype == np.int32)


def _base_labels(view: View, labels: Sequence[Label | None]) -> tuple[Label | None, ...]:
    """The label of each dim of the base; None where it does not vary."""
    found: list[Any] = [None] * len(view.base.var.aval.shape)
    for dim, label in zip(view.labels, labels, strict=True):
        if dim is not None:
            found[dim] = label
    return tuple(found)


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
