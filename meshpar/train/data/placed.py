"""Documents that stay where they lie, in arrays of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshpar.train.data.documents import Documents, share_of_ids


class Placed(NamedTuple):
    """Where the documents of one array begin, and how many tokens each has: int64[num]."""

    tokens: np.ndarray
    start: np.ndarray
    size: np.ndarray


def placed(arrays: Sequence[Placed], bos: int) -> Documents:
    """The documents of these arrays, none of which is copied; a `bos` that opens one already is not doubled.

    Each is read once, for the checksum that decides on its side of the split.
    """
    if not arrays:
        return Documents.joined([], bos, np.min_scalar_type(bos))
    opened = [_without_opening(one, bos) for one in arrays]
    columns = zip(*((np.full(len(o.size), i), o.start, o.size, _shares(o)) for i, o in enumerate(opened)), strict=True)
    array, start, size, shares = (np.concatenate(column) for column in columns)
    documents = Documents(tuple(one.tokens for one in arrays), array, start, size, shares, bos)
    return documents.where(size > 0)


def _without_opening(one: Placed, bos: int) -> Placed:
    opened = np.zeros(len(one.size), np.int64)
    some = np.flatnonzero(one.size)
    opened[some] = one.tokens[one.start[some]] == bos
    return Placed(one.tokens, one.start + opened, one.size - opened)


def _shares(one: Placed) -> np.ndarray:
    bounds = zip(one.start.tolist(), one.size.tolist(), strict=True)
    return np.array([share_of_ids(one.tokens[start : start + size]) for start, size in bounds])
