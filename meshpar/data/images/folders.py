"""Pictures in folders, one for each class."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from meshpar.data.documents import HEADING, no_data
from meshpar.data.images.decode import SUFFIXES
from meshpar.data.images.shards import PictureShard
from meshpar.errors import DataError, Problems, suggestion
from meshpar.regular_files import nearby, open_regular


@dataclass(frozen=True)
class ClassFolder(PictureShard):
    """The pictures of a class.

    Args:
      path: of the folder in which they are, at any depth.
      files: their paths below the folder, sorted.
      label: the number of the class.
    """

    files: tuple[str, ...]
    label: int

    @property
    def length(self) -> int:
        return len(self.files)

    @property
    def signature(self) -> bytes:
        return "\0".join([self.path.name, *self.files]).encode()

    def read(self, row: int) -> tuple[bytes, int]:
        try:
            with open_regular(self.path / self.files[row]) as file:
                return file.read(), self.label
        except OSError as error:
            raise DataError(f"it cannot be read: {error.strerror}") from None

    def where(self, row: int) -> str:
        return str(self.path / self.files[row])


def class_names(path: Path) -> list[str]:
    """The names of the folders in `path`, sorted: class i is the i-th.

    Raises:
      DataError: there are none.
    """
    where = f"data.path = {str(path)!r}"
    if not os.path.isdir(path):
        raise no_data(where, "there is no such folder", nearby(path))
    names = sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        fix = "a folder for each class; or data.format=parquet, webdataset or array_record, for files with labels"
        raise no_data(where, "contains no folder", fix)
    return names


def of_folders(path: Path, classes: list[str]) -> tuple[ClassFolder, ...]:
    """The pictures below `path`.

    Args:
      classes: the names of the classes, of which other folders may lack some.

    Raises:
      DataError: a folder is no class, or there is no picture.
    """
    problems = Problems()
    folders = []
    for name in class_names(path):
        if name not in classes:
            fix = suggestion(name, classes, f"the classes are {', '.join(classes[:10])}")
            problems.add(str(path / name), "is no class: the folders of data.path have no such name", fix)
            continue
        files = tuple(sorted(_pictures(path / name)))
        if files:
            folders.append(ClassFolder(path / name, files, classes.index(name)))
        elif not problems.found:
            problems.add(
                str(path / name), f"contains no picture ({', '.join(SUFFIXES)})", "remove the folder, or fill it"
            )
    problems.raise_any(DataError, HEADING)
    return tuple(folders)


def _pictures(folder: Path) -> list[str]:
    return [
        os.path.relpath(os.path.join(below, name), folder)
        for below, _, names in os.walk(folder)
        for name in names
        if name.lower().endswith(SUFFIXES) and not name.startswith(".")
    ]
