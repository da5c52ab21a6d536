"""Rows of random tokens and pictures for encoders, which the configs of these tests name."""

from __future__ import annotations

import numpy as np

LENGTH = 12


def texts(num: int = 64, label: bool = True, pad: int = 0, pairs: bool = False) -> dict[str, np.ndarray]:
    """Texts of different lengths; their class is whether the first token is in the upper half."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(5, 90, (num, LENGTH)).astype(np.int32)
    length = draw.integers(LENGTH // 2, LENGTH + 1, (num, 1))
    rows = {"tokens": np.where(np.arange(LENGTH) < length, tokens, pad).astype(np.int32)}
    if pairs:
        rows["others"] = np.where(tokens < 80, rows["tokens"] + 1, rows["tokens"])
    return rows | ({"label": (tokens[:, 0] > 47).astype(np.int32)} if label else {})


def pictures(num: int = 64, label: bool = True, end: int | None = None) -> dict[str, np.ndarray]:
    """Noise that is brighter in the upper half of the classes; with a text that ends, if `end` is an id."""
    draw = np.random.default_rng(1)
    classes = draw.integers(2, size=num).astype(np.int32)
    rows = {"image": (draw.normal(size=(num, 8, 8, 3)) + classes[:, None, None, None]).astype(np.float32)}
    if end is not None:
        tokens = draw.integers(5, 90, (num, LENGTH)).astype(np.int32)
        tokens[:, -1] = end
        rows["tokens"] = tokens
    return rows | ({"label": classes} if label else {})
