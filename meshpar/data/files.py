"""Finds the files of a corpus."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Set
from pathlib import Path, PurePath

from meshpar.data.documents import HEADING
from meshpar.errors import DataError, Problems
from meshpar.regular_files import check_regular, nearby


def find(folder: Path, glob: str, without: Set[str] = frozenset(), what: str = "folder") -> list[Path]:
    """The files below `folder` that match, sorted by relative path.

    Args:
      without: names of folders below `folder` to ignore; `glob` must begin with `**/` then.
      what: what `folder` may be, for errors.

    Raises:
      DataError: the folder does not exist; the glob leaves it or matches no file; files cannot be opened.
    """
    _check(folder, glob, what)
    problems = Problems()
    # A dangling link and a pipe also match, and are reported: the user expects them to be read.
    paths = [path for path in _matches(folder, glob, without) if not os.path.isdir(path)]
    for path in paths:
        _open(path, problems)
    if not paths:
        problems.add(f"data.glob = {glob!r}", f"matches no file below {str(folder)!r}", _other_glob(folder))
    problems.raise_any(DataError, HEADING)
    return sorted(paths, key=Path.as_posix)  # all begin with the folder


def find_or_take(path: Path, glob: str, default: str) -> list[Path]:
    """`path` itself if it is a file; otherwise the files below it, see `find`.

    Raises:
      DataError: as `find` does; or `path` is a file, and the glob is not the default, so that somebody wrote it.
    """
    if not os.path.exists(path) or os.path.isdir(path):
        return find(path, glob, what="file or folder")
    problems = Problems()
    if glob != default:
        what = f"selects files below a folder, and data.path = {str(path)!r} is a file"
        problems.add(f"data.glob = {glob!r}", what, f"remove it, or data.path={str(path.parent)!r}")
    _open(path, problems)
    problems.raise_any(DataError, HEADING)
    return [path]


def named(files: list[Path], root: Path) -> dict[str, Path]:
    """The files by their paths relative to the folder `root`; a file that is `root` itself, by its name."""
    return {(path.name if path == root else path.relative_to(root).as_posix()): path for path in files}


def cut_off(what: str) -> ValueError:
    """A file that does not end as its format says."""
    return ValueError(f"{what}: it was cut off, or is of another format", "copy it again from where it came from")


def _matches(folder: Path, glob: str, without: Set[str]) -> Iterator[Path]:
    """The paths that match; an ignored folder is not entered, because there may be many files in it."""
    if not without:
        yield from folder.glob(glob)
        return
    for below, folders, _ in os.walk(folder):
        folders[:] = [name for name in folders if name not in without]
        yield from Path(below).glob(glob.removeprefix("**/"))


def _check(folder: Path, glob: str, wanted: str) -> None:
    problems = Problems()
    if not os.path.isdir(folder):
        what = "is a file, not a folder" if os.path.exists(folder) else f"there is no such {wanted}"
        problems.add(f"data.path = {str(folder)!r}", what, nearby(folder))
    if fault := _fault(folder, glob):
        problems.add(f"data.glob = {glob!r}", fault, "use a pattern below data.path, like '**/*.txt'")
    problems.raise_any(DataError, HEADING)


def _fault(folder: Path, glob: str) -> str | None:
    """What is wrong with a pattern; None if it is valid."""
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
    """Suggests the pattern of the most frequent suffix in the folder."""
    suffixes = Counter(path.suffix for path in folder.rglob("*") if path.is_file())
    if not suffixes:
        return "the folder contains no files"
    suffix, num = suffixes.most_common(1)[0]
    return f"data.glob='**/*{suffix}' matches {num}"


def _open(path: Path, problems: Problems) -> None:
    """Opens a file, so that all unreadable files are reported at once, before any is read."""
    try:
        check_regular(path)
    except OSError as error:
        problems.add(str(path), f"cannot be read: {error.strerror}", "make it readable, or narrow data.glob")
