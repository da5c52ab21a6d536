"""Finding documents, and dividing them into those to train on and those held out."""

from __future__ import annotations

import io
import os
import zlib
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath

import numpy as np

from meshpar.errors import DataError, Problem, Problems

HEADING = "there is no data to train on:"


@dataclass(frozen=True)
class Document:
    """One document that has not been read.

    Args:
      name: identifies it; decides on its order and on the side of the split.
      size: tokens without the one that opens it; 0 is not a document.
      read: () -> integers[size].
    """

    name: str
    size: int
    read: Callable[[], np.ndarray]

    @property
    def share(self) -> float:
        """A number in [0, 1) that depends on nothing but the name: held out if it is below the fraction."""
        return zlib.crc32(os.fsencode(self.name)) / 2**32


def find(folder: Path, glob: str, without: Set[str] = frozenset()) -> list[Document]:
    """The files below `folder` that match, sorted by relative path; they are read as bytes, never executed.

    Args:
      without: names of folders below `folder` that are left out.

    Raises:
      DataError: there is no such folder; the glob leads out of it or matches no file; files cannot be opened.
    """
    _check(folder, glob)
    problems, documents = Problems(), []
    for path in folder.glob(glob):
        name = path.relative_to(folder)
        # A link to nowhere is kept, to be reported: it was meant to be read.
        if without.isdisjoint(name.parts) and (path.is_file() or not path.exists()):
            documents.append(Document(name.as_posix(), _size(path, problems), partial(_bytes, path)))
    if not documents:
        problems.add(f"data.glob = {glob!r}", f"matches no file below {str(folder)!r}", _other_glob(folder))
    problems.raise_any(DataError, HEADING)
    return sorted(documents, key=lambda document: document.name)


def _check(folder: Path, glob: str) -> None:
    problems = Problems()
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "there is no such folder"
        fix = f"it is relative to the working directory, {Path.cwd()}"
        problems.add(f"data.path = {str(folder)!r}", what, fix)
    if fault := _fault(folder, glob):
        problems.add(f"data.glob = {glob!r}", fault, "give a pattern below data.path, like '**/*.txt'")
    problems.raise_any(DataError, HEADING)


def split(documents: Sequence[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """Documents to train on, and about `fraction` of them held out, by name: a new one moves no other.

    >>> corpus = [Document(name, 1, lambda: np.array([7])) for name in "abc"]
    >>> [[document.name for document in side] for side in split(corpus, fraction=0.5)]
    [['a'], ['b', 'c']]

    Args:
      documents: those of size 0 are on no side.

    Raises:
      DataError: one of the sides would be empty.
    """
    present = [document for document in documents if document.size]
    sides = [d for d in present if d.share >= fraction], [d for d in present if d.share < fraction]
    if not all(sides):
        raise DataError(f"{HEADING}\n{_one_sided(documents, present, fraction)}")
    return sides


def _one_sided(documents: Sequence[Document], present: Sequence[Document], fraction: float) -> Problem:
    """Why this fraction splits nothing, and one that puts a single document on the empty side."""
    num, shares = len(present), sorted(document.share for document in present)
    if num == 0:
        return Problem("data", f"all {len(documents)} documents are empty", "give documents with text in them")
    if num == 1:
        what = "is the only document that is not empty: nothing is left for the other side of the split"
        return Problem(present[0].name, what, "give at least two documents: cut this one into two files")
    none = shares[0] >= fraction
    low, high = shares[:2] if none else shares[-2:]
    effect = "holds out 1" if none else "leaves 1 to train on"
    return Problem(
        f"data.held_out_fraction = {fraction:g}",
        f"{'none' if none else 'all'} of {num} documents would be held out",
        f"data.held_out_fraction={(low + high) / 2:.4g} {effect}",
    )


def _fault(folder: Path, glob: str) -> str | None:
    """What is wrong with a pattern; None if nothing is."""
    if not glob or PurePath(glob).anchor or ".." in PurePath(glob).parts:
        return "is empty or leads out of data.path"
    try:
        next(folder.glob(glob), None)
    except ValueError as error:
        return str(error)
    return None


def _other_glob(folder: Path) -> str:
    """The pattern for the most frequent suffix that there is."""
    suffixes = Counter(path.suffix for path in folder.rglob("*") if path.is_file())
    if not suffixes:
        return "the folder holds no file at all"
    suffix, num = suffixes.most_common(1)[0]
    return f"data.glob='**/*{suffix}' matches {num}"


def _size(path: Path, problems: Problems) -> int:
    """Bytes in a file; opening it shows now, and for all files at once, what cannot be read."""
    try:
        with path.open("rb") as file:
            return file.seek(0, io.SEEK_END)
    except OSError as error:
        problems.add(str(path), f"cannot be read: {error.strerror}", "make it readable, or narrow data.glob")
        return 0


def _bytes(path: Path) -> np.ndarray:
    return np.fromfile(path, np.uint8)
