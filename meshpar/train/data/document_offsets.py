"""Documents that remain in the arrays of token ids that they come in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshpar.train.data.documents import Documents, share_of_ids


class DocumentOffsets(NamedTuple):
    """The documents of one array: where each starts, and its number of tokens, int64[num] each."""

    tokens: np.ndarray
    start: np.ndarray
    size: np.ndarray


def placed(arrays: Sequence[DocumentOffsets], bos: int) -> Documents:
    """The documents of these arrays, without copying them. A `bos` at the start of a document is not doubled.

    Every document is read once, to compute the checksum that determines its side of the split.
    """
    if not arrays:
        return Documents.joined([], bos, np.min_scalar_type(bos))
    columns = []
    for i, (tokens, start, size) in enumerate(arrays):
        opened = np.zeros(len(size), np.int64)
        some = np.flatnonzero(size)
        opened[some] = tokens[start[some]] == bos
        start = start + opened
        size = size - opened
        bounds = zip(start.tolist(), size.tolist(), strict=True)
        shares = np.array([share_of_ids(tokens[begin : begin + length]) for begin, length in bounds])
        columns.append((np.full(len(size), i), start, size, shares))
    array, start, size, share = (np.concatenate(column) for column in zip(*columns, strict=True))
    return Documents(tuple(one.tokens for one in arrays), array, start, size, share, bos).where(size > 0)
