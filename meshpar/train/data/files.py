"""Finding the files of a corpus."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Set
from pathlib import Path, PurePath

from meshpar.errors import DataError, Problems
from meshpar.regular import open_regular
from meshpar.train.data.documents import HEADING


def find(folder: Path, glob: str, without: Set[str] = frozenset(), what: str = "folder") -> list[Path]:
    """The files below `folder` that match, sorted by relative path; they are read, never executed.

    Args:
      without: names of folders below `folder` that are left out.
      what: could be there in place of the folder, for the error.

    Raises:
      DataError: there is no such folder; the glob leads out of it or matches no file; files cannot be opened.
    """
    _check(folder, glob, what)
    problems = Problems()
    # A link to nowhere and a pipe are kept, to be reported: they were meant to be read.
    matches = [path for path in folder.glob(glob) if not os.path.isdir(path)]
    found = [path for path in matches if without.isdisjoint(path.relative_to(folder).parts)]
    for path in found:
        _open(path, problems)
    if not found:
        problems.add(f"data.glob = {glob!r}", f"matches no file below {str(folder)!r}", _other_glob(folder))
    problems.raise_any(DataError, HEADING)
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def find_or_take(path: Path, glob: str) -> list[Path]:
    """As `find`; or the one file that `path` is itself."""
    if not os.path.exists(path) or os.path.isdir(path):
        return find(path, glob, what="file or folder")
    problems = Problems()
    _open(path, problems)
    problems.raise_any(DataError, HEADING)
    return [path]


def named(files: list[Path], root: Path) -> dict[str, Path]:
    """The files by their names below the folder `root`; one that is `root` itself by its own."""
    return {(path.name if path == root else path.relative_to(root).as_posix()): path for path in files}


def _check(folder: Path, glob: str, wanted: str) -> None:
    problems = Problems()
    if not os.path.isdir(folder):
        what = "is a file, not a folder" if os.path.exists(folder) else f"there is no such {wanted}"
        fix = f"it is relative to the working directory, {Path.cwd()}"
        problems.add(f"data.path = {str(folder)!r}", what, fix)
    if fault := _fault(folder, glob):
        problems.add(f"data.glob = {glob!r}", fault, "give a pattern below data.path, like '**/*.txt'")
    problems.raise_any(DataError, HEADING)


def _fault(folder: Path, glob: str) -> str | None:
    """What is wrong with a pattern; None if nothing is."""
    if not glob or PurePath(glob).anchor or ".." in PurePath(glob).parts:
        return "is empty or leads out of data.path"
    try:
        next(folder.glob(glob), None)
    except ValueError as error:
        return str(error)
    except OSError as error:
        return error.strerror if os.path.isdir(folder) else None
    return None


def _other_glob(folder: Path) -> str:
    """The pattern for the most frequent suffix that there is."""
    suffixes = Counter(path.suffix for path in folder.rglob("*") if path.is_file())
    if not suffixes:
        return "the folder holds no file at all"
    suffix, num = suffixes.most_common(1)[0]
    return f"data.glob='**/*{suffix}' matches {num}"


def _open(path: Path, problems: Problems) -> None:
    """Opening shows now, and for all files at once, what cannot be read."""
    try:
        open_regular(path).close()
    except OSError as error:
        problems.add(str(path), f"cannot be read: {error.strerror}", "make it readable, or narrow data.glob")
