"""Documents, wherever their tokens lie, and how they are divided into those to train on and those held out."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshpar.errors import DataError, Problem

HEADING = "there is no data to train on:"


@dataclass(frozen=True, repr=False)
class Documents:
    """Documents in their order: of each, in which array its tokens lie and where. None is empty.

    The token that opens a document lies nowhere: it is put before each when tokens are taken.

    Args:
      arrays: integers[length] each, in memory or mapped into it from files.
      array, start, size: int64[num]. Of each document: which array, where in it, and how many tokens.
      share: float64[num], in [0, 1). A document whose share is below the held-out fraction is held out.
      bos: the token that opens each document.

    Memory: 40 bytes a document, beside the arrays.

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
        """(share, tokens) of each document, copied into one array of `dtype` in memory."""
        shares, bodies = [], []
        for share, tokens in documents:
            shares.append(share)
            bodies.append(tokens.astype(dtype))
        tokens = np.concatenate([np.zeros(0, dtype), *bodies])
        return cls.in_a_line(tokens, np.array([len(body) for body in bodies], np.int64), np.array(shares), bos)

    @classmethod
    def in_a_line(cls, tokens: np.ndarray, size: np.ndarray, share: np.ndarray, bos: int) -> Documents:
        """Documents that follow each other in one array."""
        whole = cls((tokens,), np.zeros_like(size), np.cumsum(size) - size, size, share, bos)
        return whole.where(size > 0)

    def __len__(self) -> int:
        return len(self.size)

    def __repr__(self) -> str:
        return f"Documents({len(self)} with {self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        """With those that open a document."""
        return int(self._ends[-1]) if len(self) else 0

    def where(self, chosen: np.ndarray) -> Documents:
        """Those that a mask bool[num] chooses, in their order."""
        columns = (column[chosen] for column in (self.array, self.start, self.size, self.share))
        return Documents(self.arrays, *columns, bos=self.bos)

    def split(self, fraction: float) -> tuple[Documents, Documents]:
        """Documents to train on, and about `fraction` of them held out; a new one moves no other.

        Raises:
          DataError: one of the sides would be empty.
        """
        held_out = self.share < fraction
        if held_out.all() or not held_out.any():
            raise DataError(f"{HEADING}\n{_one_sided(np.sort(self.share).tolist(), fraction)}")
        return self.where(~held_out), self.where(held_out)

    def take(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens at these places in the line of all documents, each opened by `bos`.

        Args:
          at: int64[...], not negative; at or beyond `num_tokens` there is nothing but `bos`.

        Returns:
          (int32[...], bool[...]): tokens, and whether they open a document.
        """
        document = np.searchsorted(self._ends, at, side="right").clip(max=len(self) - 1)
        size = self.size[document]
        offset = at - (self._ends[document] - size)  # in the document, -1 for the token that opens it
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


def share(content: bytes) -> float:
    """A number in [0, 1) that depends on nothing but the content."""
    return zlib.crc32(content) / 2**32


def share_of_ids(ids: np.ndarray) -> float:
    """The same, whatever the dtype of the ids."""
    return share(ids.astype("<u4").tobytes())


def _one_sided(shares: list[float], fraction: float) -> Problem:
    """Why this fraction splits nothing, and one that puts a single document on the empty side."""
    num = len(shares)
    if num == 0:
        return Problem("data", "no document has a token in it", "give documents with text in them")
    if num == 1:
        what = "only one document is not empty: nothing is left for the other side of the split"
        return Problem("data", what, "give at least two documents: cut this one into two")
    none = shares[0] >= fraction
    low, high = shares[:2] if none else shares[-2:]
    effect = "holds out 1" if none else "leaves 1 to train on"
    return Problem(
        f"data.held_out_fraction = {fraction:g}",
        f"{'none' if none else 'all'} of {num} documents would be held out",
        f"data.held_out_fraction={(low + high) / 2:.4g} {effect}",
    )
