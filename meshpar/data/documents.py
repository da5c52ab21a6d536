"""Documents as slices of token arrays, and their split into training and held-out documents."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshpar.errors import DataError, Problem

HEADING = "there is no data to train on:"


class DocumentOffsets(NamedTuple):
    """The documents of one array: where each starts, and its number of tokens, int64[num] each."""

    tokens: np.ndarray
    start: np.ndarray
    size: np.ndarray


@dataclass(frozen=True, repr=False)
class Documents:
    """A sequence of documents, none of them empty. Each document is a slice of an array of tokens.

    The opening token `bos` is not stored: it is inserted before each document when tokens are read.

    Args:
      arrays: integers[length] each, in memory or memory-mapped.
      array, start, size: int64[num]. Each document's array, its offset in the array, and its number of tokens.
      share: float64[num], in [0, 1). A document is held out if its share is below the held-out fraction.
      bos: the token that opens each document.

    Memory: 40 bytes per document, in addition to the arrays.

    >>> documents = Documents.joined([(0.3, np.array([1, 2])), (0.7, np.array([3]))], bos=9, dtype=np.uint8)
    >>> documents.take(np.arange(6))[0].tolist()
    [9, 1, 2, 9, 3, 9]
    >>> [side.take(np.arange(side.num_tokens))[0].tolist() for side in documents.split(0.5)]
    [[9, 3], [9, 1, 2]]
    """

    arrays: tuple[np.ndarray, ...]
    array: np.ndarray
    start: np.ndarray
    size: np.ndarray
    share: np.ndarray
    bos: int

    @classmethod
    def joined(cls, documents: Iterable[tuple[float, np.ndarray]], bos: int, dtype: np.typing.DTypeLike) -> Documents:
        """Copies (share, tokens) of each document into one array of `dtype` in memory."""
        shares = []
        bodies = []
        for share, tokens in documents:
            shares.append(share)
            bodies.append(tokens.astype(dtype, copy=False))
        tokens = np.concatenate([np.zeros(0, dtype), *bodies])
        return cls.in_a_line(tokens, np.array([len(body) for body in bodies], np.int64), np.array(shares), bos)

    @classmethod
    def in_a_line(cls, tokens: np.ndarray, size: np.ndarray, share: np.ndarray, bos: int) -> Documents:
        """Documents that are stored one after the other in one array."""
        whole = cls((tokens,), np.zeros_like(size), np.cumsum(size) - size, size, share, bos)
        return whole.where(size > 0)

    @classmethod
    def in_place(cls, arrays: Sequence[DocumentOffsets], bos: int) -> Documents:
        """The documents of these arrays, without copying them. A `bos` at the start of a document is not doubled.

        Every document is read once, to compute the checksum that determines its side of the split.
        """
        if not arrays:
            return cls.joined([], bos, np.min_scalar_type(bos))
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
        return cls(tuple(one.tokens for one in arrays), array, start, size, share, bos).where(size > 0)

    def __len__(self) -> int:
        return len(self.size)

    def __repr__(self) -> str:
        return f"Documents({len(self)} with {self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        """The number of tokens, including one `bos` per document."""
        return int(self._ends[-1]) if len(self) else 0

    def where(self, chosen: np.ndarray) -> Documents:
        """The documents that a mask bool[num] selects, in the same order."""
        columns = (column[chosen] for column in (self.array, self.start, self.size, self.share))
        return Documents(self.arrays, *columns, bos=self.bos)

    def split(self, fraction: float) -> tuple[Documents, Documents]:
        """Returns the training documents, and the held-out documents, which are about `fraction` of all.

        The side of a document does not depend on the other documents.

        Raises:
          DataError: one of the sides would be empty.
        """
        held_out = is_held_out(self.share, fraction)
        return self.where(~held_out), self.where(held_out)

    def take(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads tokens by their positions in the sequence of all documents, each opened by `bos`.

        Args:
          at: int64[...], not negative; positions at or beyond `num_tokens` read `bos`.

        Returns:
          (int32[...], bool[...]): tokens, and whether each opens a document.
        """
        document = np.searchsorted(self._ends, at, side="right").clip(max=len(self) - 1)
        size = self.size[document]
        offset = at - (self._ends[document] - size)  # from the document's first stored token; -1 for its `bos`
        opens = (offset < 0) | (offset >= size)
        tokens = self._read(self.array[document], self.start[document] + offset.clip(0, size - 1))
        return np.where(opens, np.int32(self.bos), tokens), opens

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.size + 1)

    def _read(self, array: np.ndarray, at: np.ndarray) -> np.ndarray:
        if len(self.arrays) == 1:
            return self.arrays[0][at].astype(np.int32)
        tokens = np.empty(at.shape, np.int32)
        for which in np.unique(array):
            here = array == which
            tokens[here] = self.arrays[which][at[here]]
        return tokens


def is_held_out(shares: np.ndarray, fraction: float) -> np.ndarray:
    """For each share float64[num] whether its document is held out, bool[num].

    Raises:
      DataError: all are, or none is.
    """
    held_out = shares < fraction
    if held_out.all() or not held_out.any():
        raise one_sided(np.sort(shares).tolist(), len(shares), fraction)
    return held_out


def share(content: bytes) -> float:
    """A number in [0, 1) that depends only on the content."""
    return zlib.crc32(content) / 2**32


def share_of_ids(ids: np.ndarray) -> float:
    """The share of token ids, independent of their dtype."""
    return share(ids.astype("<u4").tobytes())


def no_data(where: str, what: str, fix: str = "") -> DataError:
    """An error with one problem, for the caller to raise."""
    return DataError(f"{HEADING}\n{Problem(where, what, fix)}")


def one_sided(shares: list[float], num: int, fraction: float) -> DataError:
    """Says why this fraction leaves one side empty, and suggests one that leaves a single document there.

    Args:
      shares: of all `num` documents, sorted; the two lowest and the two highest suffice.
    """
    if num == 0:
        return no_data("data", "no document contains a token", "provide documents that contain text")
    if num == 1:
        what = "only one document is not empty, and each side of the split needs one"
        return no_data("data", what, "provide at least two documents, for example by splitting this one")
    none = shares[0] >= fraction
    low, high = shares[:2] if none else shares[-2:]
    effect = "holds out 1" if none else "leaves 1 to train on"
    return no_data(
        f"data.held_out_fraction = {fraction:g}",
        f"{'none' if none else 'all'} of {num} documents would be held out",
        f"data.held_out_fraction={(low + high) / 2:.4g} {effect}",
    )
