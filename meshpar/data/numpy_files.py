"""NumPy files of token ids, mapped into memory."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib import format as npy

from meshpar.config import Coerced
from meshpar.data.corpus import AtPath, FileCorpus
from meshpar.data.documents import DocumentOffsets, Documents
from meshpar.data.encode import check_ids
from meshpar.data.reading import read_each
from meshpar.data.tokenizer import Tokenizer
from meshpar.errors import DataError
from meshpar.regular_files import open_regular
from meshpar.tree import human_bytes

_WINDOW = 2**24  # elements that are processed at once
MOST_UNPACKED = 2**28
MOST_COMPRESSED = 100
"""An archive is refused if it expands to more bytes and by a larger factor: a few MB can expand to TBs of zeros."""


class Numpy(AtPath, FileCorpus):
    """Files of token ids. In a matrix each row is a document; in a vector each `bos` starts one.

    A .npy file is mapped into memory; the arrays of a .npz file are read.

    >>> Numpy(path="tokens.npy", tokenizer={"kind": "ids", "vocab_size": 50257, "bos": 50256}).vocab_size
    50257
    """

    kind: Literal["numpy"] = "numpy"
    glob: str = "**/*.np[yz]"
    tokenizer: Coerced[Tokenizer, str | dict[str, Any]]
    """The tokenizer of the ids."""

    def documents(self) -> Documents:
        files = self.files()
        of_files = [offsets for _, _, offsets in read_each(zip(files, files, strict=True), self._of_file)]
        return Documents.in_place([*chain(*of_files)], self.tokenizer.bos)

    def _of_file(self, path: Path) -> list[DocumentOffsets]:
        with closing(_arrays(path)) as arrays:
            return [self._documents(array) for array in arrays]

    def _documents(self, array: np.ndarray) -> DocumentOffsets:
        if array.ndim not in (1, 2):
            raise DataError(f"has the shape {array.shape}: token ids are a vector or a matrix")
        tokens = array.reshape(-1)
        opens = [np.array([-1])]
        for at in range(0, max(1, tokens.size), _WINDOW):
            window = tokens[at : at + _WINDOW]
            check_ids(window, self.vocab_size)
            if array.ndim == 1:
                opens.append(np.flatnonzero(window == self.tokenizer.bos) + at)
        if array.ndim == 2:
            size = np.full(array.shape[0], array.shape[1])
            return DocumentOffsets(tokens, np.arange(array.shape[0]) * array.shape[1], size)
        ends = np.concatenate([*opens, [tokens.size]])
        return DocumentOffsets(tokens, ends[:-1] + 1, np.diff(ends) - 1)


def _arrays(path: Path) -> Generator[np.ndarray, None, None]:
    """The arrays of a file.

    Raises:
      DataError: the file contains no arrays, or the size of an array differs from its header.
    """
    with open_regular(path) as file, _described():
        size = os.fstat(file.fileno()).st_size
        if file.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX:
            array: Any = _without_warnings(npy.open_memmap, path, mode="r")
            yield _complete(array, size - array.offset)
            return
        with zipfile.ZipFile(file) as archive:
            yield from _archived(archive, size)


def _archived(archive: zipfile.ZipFile, num_bytes: int) -> Iterator[np.ndarray]:
    members = sorted(archive.infolist(), key=lambda member: member.filename.removesuffix(".npy"))
    size = sum(member.file_size for member in members)
    if size > max(MOST_UNPACKED, MOST_COMPRESSED * num_bytes):
        what = f"would expand to {human_bytes(size)}, {size // num_bytes} times its size"
        raise DataError(f"{what}, more than token ids compress; save the arrays as .npy if this is intended")
    for member in members:
        with archive.open(member) as content:
            array = _without_warnings(npy.read_array, content)
            yield _complete(array, array.nbytes + len(content.read()))


def _complete(array: np.ndarray, num_bytes: int) -> np.ndarray:
    """Checks that an array has the bytes that its header describes. NumPy notices missing ones, but not more."""
    if array.nbytes != num_bytes:
        what = f"its header describes {array.dtype}{list(array.shape)}, but it has {num_bytes} bytes"
        raise DataError(f"is too long or damaged: {what}")
    return array


def _without_warnings(read: Callable[..., np.ndarray], *arguments: Any, **options: Any) -> np.ndarray:
    """Reads an array, with warnings as errors: Python's parser, which reads the headers, only warns of damage."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return read(*arguments, **options)


@contextmanager
def _described() -> Iterator[None]:
    """Describes any error in one line: NumPy and zipfile raise more kinds of errors than they document."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        why = str(error) or type(error).__name__
        raise DataError(f"is not a readable array: {why.splitlines()[0]}") from None
