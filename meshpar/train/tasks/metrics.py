"""Metrics of all rows of an evaluation together, in NumPy: they are no means over batches.

Each equals scikit-learn's function of that name, which the tests compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshpar.data.rows.spec import COUNTED

Results = Mapping[str, np.ndarray]


class Gathered:
    """The results of the rows that count, of all batches so far. They are held in the memory of each process."""

    def __init__(self) -> None:
        self._parts: list[dict[str, np.ndarray]] = []

    def add(self, results: Mapping[str, Any]) -> None:
        """Adds the results of a batch: name -> array[rows, ...], and `counted`."""
        is_counted = np.asarray(results[COUNTED]) > 0
        self._parts.append({name: np.asarray(x)[is_counted] for name, x in results.items() if name != COUNTED})

    @property
    def all(self) -> dict[str, np.ndarray]:
        return {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}


@dataclass(frozen=True)
class Measure:
    """The metrics of an evaluation that are no means over batches.

    Args:
      of_rows: (params, batch, carried) -> the results of the rows of a batch; None if no metric needs them.
      row_metrics: name -> a function of the results of all rows.
      of_means: the means of an evaluation -> metrics that follow from them.
    """

    of_rows: Callable[[Any, Any, Any], Mapping[str, Any]] | None
    row_metrics: Mapping[str, Callable[[Results], float]]
    of_means: Callable[[Mapping[str, float]], Mapping[str, float]]

    def metrics(self, means: Mapping[str, float], gathered: Gathered) -> dict[str, float]:
        found = dict(self.of_means(means))
        if self.of_rows:
            results = gathered.all
            found |= {name: metric(results) for name, metric in self.row_metrics.items()}
        return found


def f1(results: Results) -> float:
    """F1 of class 1 if there are the classes 0 and 1, else the mean over the classes that occur. 0 for 0 / 0.

    >>> f1({"label": np.array([0, 1, 1, 0]), "predicted": np.array([0, 1, 0, 0])})
    0.6666666666666666
    """
    label, predicted = results["label"], results["predicted"]
    classes = np.union1d(label, predicted)
    is_binary = classes.max(initial=0) <= 1
    scores = []
    for one in [1] if is_binary else classes:
        right = int(((label == one) & (predicted == one)).sum())
        both = int((label == one).sum() + (predicted == one).sum())
        scores.append(2 * right / both if both else 0.0)
    return float(np.mean(scores))


def auc(results: Results) -> float:
    """The area under the ROC curve; of more than two classes the mean of each against the rest. NaN if one is missing.

    >>> auc({"label": np.array([0, 1, 1]), "scores": np.array([[0.9, 0.1], [0.4, 0.6], [0.95, 0.05]])})
    0.5
    """
    label, scores = results["label"], results["scores"].astype(np.float64)
    if scores.shape[-1] == 2:
        return _area(label == 1, scores[:, 1])
    return float(np.mean([_area(label == one, scores[:, one]) for one in range(scores.shape[-1])]))


def _area(is_positive: np.ndarray, score: np.ndarray) -> float:
    """The probability that a positive row has a higher score than a negative one; equal scores count one half."""
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positive = int(is_positive.sum())
    negative = len(is_positive) - positive
    if not positive or not negative:
        return float("nan")
    return float((rank[is_positive].sum() - positive * (positive + 1) / 2) / (positive * negative))


def r2(results: Results) -> float:
    """The fraction of the variance that is explained; the mean over the numbers of a row."""
    label = results["label"].astype(np.float64)
    label = label.reshape(len(label), -1)
    error = label - results["predicted"].astype(np.float64).reshape(label.shape)
    spread = np.square(label - label.mean(0)).sum(0)
    left = np.square(error).sum(0)
    safe = np.where(spread > 0, spread, 1.0)
    return float(np.where(spread > 0, 1 - left / safe, np.where(left > 0, 0.0, 1.0)).mean())


def recall(results: Results, within: int) -> float:
    """For how many rows `b` is among the `within` nearest of `a`. Of equal products those of other rows come first.

    >>> recall({"a": np.eye(3), "b": np.eye(3)[[0, 2, 1]]}, within=1)
    0.3333333333333333
    """
    a, b = results["a"], results["b"]
    found = 0
    for start in range(0, len(a), 1024):
        products = a[start : start + 1024] @ b.T
        own = products[np.arange(len(products)), start + np.arange(len(products))]
        found += int(((products >= own[:, None]).sum(-1) - 1 < within).sum())
    return found / len(a)
