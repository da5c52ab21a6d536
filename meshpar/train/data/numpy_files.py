"""NumPy files of token ids, mapped into memory."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import numpy as np

from meshpar.errors import DataError, Problems
from meshpar.regular import open_regular
from meshpar.train.data.corpus import Corpus
from meshpar.train.data.documents import HEADING, Documents
from meshpar.train.data.encode import check_ids
from meshpar.train.data.files import find_or_take, named
from meshpar.train.data.npy import MAGIC, map_array, read_array
from meshpar.train.data.placed import Placed, placed
from meshpar.train.data.tokenizer import AnyTokenizer, tokenizer_file
from meshpar.tree import human_bytes

_WINDOW = 2**24  # elements that are looked at together
MOST_UNPACKED = 2**28
MOST_COMPRESSED = 100
"""An archive that grows to more bytes, and by more than this factor, is refused: a few MB can hold TBs of zeros."""


class Numpy(Corpus):
    """Files of token ids: each row of a matrix is a document; in a vector, `bos` opens each.

    A .npy file is mapped, not read; the arrays of a .npz file are read whole.

    >>> Numpy(path="tokens.npy", tokenizer={"kind": "ids", "vocab_size": 50257, "bos": 50256}).vocab_size
    50257
    """

    kind: Literal["numpy"] = "numpy"
    path: str
    """A file, or a folder, relative to the working directory."""
    glob: str = "**/*.np[yz]"
    """Which files below the folder."""
    tokenizer: AnyTokenizer
    """What made the ids: `path/to/tokenizer.json`, or `{kind: ids, vocab_size: 50257, bos: 50256}`."""

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def named_files(self) -> dict[str, Path]:
        root = Path(self.path)
        return named(find_or_take(root, self.glob), root) | tokenizer_file(self.tokenizer)

    def documents(self) -> Documents:
        problems, found = Problems(), []
        for path in find_or_take(Path(self.path), self.glob):
            with closing(_arrays(path)) as arrays:
                try:
                    found += [self._documents(array) for array in arrays]
                except DataError as error:
                    problems.add(str(path), str(error))
        problems.raise_any(DataError, HEADING)
        return placed(found, self.tokenizer.bos)

    def _documents(self, array: np.ndarray) -> Placed:
        if array.ndim not in (1, 2):
            raise DataError(f"has the shape {array.shape}: token ids are a vector or a matrix")
        tokens = array.reshape(-1)
        for at in range(0, max(1, tokens.size), _WINDOW):
            check_ids(tokens[at : at + _WINDOW], self.vocab_size)
        if array.ndim == 2:
            size = np.full(array.shape[0], array.shape[1])
            return Placed(tokens, np.arange(array.shape[0]) * array.shape[1], size)
        opens = np.concatenate([[-1], *_places(tokens, self.tokenizer.bos), [tokens.size]])
        return Placed(tokens, opens[:-1] + 1, np.diff(opens) - 1)


def _arrays(path: Path) -> Generator[np.ndarray, None, None]:
    """Raises DataError where it is not a file of arrays."""
    with open_regular(path) as file:
        if file.read(len(MAGIC)) == MAGIC:
            yield map_array(path)
            return
        try:
            with zipfile.ZipFile(file) as archive:
                yield from _archived(archive, os.fstat(file.fileno()).st_size)
        except DataError:
            raise
        except Exception as error:  # an archive may fail in more ways than the library lists
            said = str(error) or type(error).__name__
            raise DataError(f"is not an array that can be read: {said.splitlines()[0]}") from None


def _archived(archive: zipfile.ZipFile, num_bytes: int) -> Iterator[np.ndarray]:
    members = sorted(archive.infolist(), key=lambda member: member.filename.removesuffix(".npy"))
    size = sum(member.file_size for member in members)
    if size > max(MOST_UNPACKED, MOST_COMPRESSED * num_bytes):
        what = f"would take {human_bytes(size)}, {size // num_bytes} times what the file has"
        raise DataError(f"{what}: token ids are not compressed so far; save the arrays as .npy if they are meant")
    for member in members:
        with archive.open(member) as content:
            yield read_array(content, member.file_size)


def _places(tokens: np.ndarray, token: int) -> Iterator[np.ndarray]:
    """Where a token stands, a window at a time."""
    for at in range(0, tokens.size, _WINDOW):
        yield np.flatnonzero(tokens[at : at + _WINDOW] == token) + at
