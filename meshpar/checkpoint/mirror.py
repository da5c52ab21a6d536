"""Copies the directory of a run to a store after each checkpoint, and back to a machine that has no checkpoint of it.

    s3://bucket/run/checkpoints/300/...          as in the directory
    s3://bucket/run/checkpoints/300/sha256.json  written last: a checkpoint without it is not whole, and is not read
    s3://bucket/run/metrics.jsonl, ...           the records, as they were at the last checkpoint or at the end

The directory stays what a run reads and writes. So a store that fails loses nothing: what it lacks is copied with the
next checkpoint, and a run whose last copy failed ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax

from meshpar import store
from meshpar.checkpoint import checksums, lock
from meshpar.checkpoint.agree import on_all
from meshpar.checkpoint.saved import FOLDER, steps
from meshpar.errors import CheckpointError, DataError
from meshpar.progress import say

PARTIAL = ".fetched.partial"
LOGS = "logs"
"""The folder of what processes print, which their launcher begins before the run; it stays on its machine."""
AT_A_TIME = 8
"""Files that travel beside each other."""
T = TypeVar("T")


class Mirror:
    """The copy of a run's directory at an address; the first process uses it.

    Args:
      address: of a folder in a store; without one, nothing is copied.
      folder: the directory of the run.

    Raises:
      DataError: the library of the store is not installed, or the address holds a password.
    """

    def __init__(self, address: str | None, folder: Path):
        self.address, self.folder = address, folder
        self.system: Any = None
        self.root = ""
        if address:
            self.system, self.root = store.opened(address, "checkpoints.mirror")
        self.error: DataError | None = None
        self._copied: dict[str, tuple[int, int]] = {}
        self._steps: set[int] = set()

    def fetch(self) -> None:
        """Copies the store's whole checkpoints and records into the directory, if it has no checkpoint.

        Raises:
          CheckpointError: the directory has an older checkpoint, or records of another run.
          DataError: the store cannot be read.
        """
        if not self.address:
            return
        names = self._names()
        there, mine = self._whole(names), steps(self.folder / FOLDER)
        self._steps = there & set(mine)
        newer = sorted(step for step in there if step > max(mine, default=-1))
        if not newer:
            return
        records = [name for name in names if name.partition("/")[0] not in (FOLDER, LOGS)]
        self._check_empty(newer[-1], mine, records)
        say(f"meshpar: copies the checkpoints {', '.join(map(str, newer))} of {self.address} to {self.folder}")
        for step in newer:
            made = self.folder / FOLDER / f"{step}{PARTIAL}"
            inside = [name for name in names if name.startswith(f"{FOLDER}/{step}/")]
            self._get({name: made / name.removeprefix(f"{FOLDER}/{step}/") for name in inside}, names)
            made.rename(made.with_name(str(step)))
        self._get({name: self.folder / name for name in records}, names)
        self._steps |= set(newer)

    def push(self) -> None:
        """Copies what is new in the directory, and removes the checkpoints that it removed. Failures are kept."""
        if not self.address:
            return
        try:
            here = set(steps(self.folder / FOLDER))
            for step in sorted(here - self._steps):
                self._put_checkpoint(step)
                self._steps.add(step)
            self._put(path for path in self._records() if self._copied.get(self._name(path)) != _version(path))
            for step in sorted(self._steps - here):
                self._remove_checkpoint(step)
                self._steps.remove(step)
            self.error = None
        except DataError as error:
            self.error = error
            say(f"meshpar: {error}; {self.folder} is whole, and the next checkpoint is copied with this one")

    def check(self) -> None:
        """Raises CheckpointError if the store lacks something."""
        if self.error:
            raise CheckpointError(f"the mirror is not complete: {self.error}; {self.folder} is whole: start again")

    def _check_empty(self, newest: int, mine: list[int], records: Iterable[str]) -> None:
        if mine:
            what = f"{self.address} has step {newest}, and {self.folder} ends at {mine[-1]}: another machine went on"
            raise CheckpointError(f"{what}; move {self.folder} away to go on from there, or set another mirror")
        if found := [name for name in records if (self.folder / name).exists()]:
            what = f"{self.folder} has no checkpoint, but {', '.join(found[:3])}, which {self.address} has too"
            raise CheckpointError(f"{what}; move {self.folder} away to go on from the store, or set another mirror")

    def _put_checkpoint(self, step: int) -> None:
        """The checksums come last, after the sizes of all other files were compared."""
        folder = self.folder / FOLDER / str(step)
        last = folder / checksums.FILE
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != last]
        self._put(files)
        there = self._names()
        for path in files:
            if there.get(name := self._name(path)) != path.stat().st_size:
                raise DataError(f"{self.address}: {name} has {there.get(name)} bytes, not {path.stat().st_size}")
        self._put([last])

    def _remove_checkpoint(self, step: int) -> None:
        """The checksums go first."""
        there = f"{self.root}/{FOLDER}/{step}"
        for path in (f"{there}/{checksums.FILE}", there):
            store.tried(f"{self.address}: checkpoint {step} cannot be removed", partial(self._remove, path))

    def _remove(self, path: str) -> None:
        if self.system.exists(path):
            self.system.rm(path, recursive=True)

    def _put(self, paths: Iterable[Path]) -> None:
        def put(path: Path) -> None:
            name, version = self._name(path), _version(path)
            there = f"{self.root}/{name}"

            def write() -> None:
                if "file" in self.system.protocol:  # object stores have no folders
                    self.system.makedirs(there.rpartition("/")[0], exist_ok=True)
                self.system.put_file(str(path), there)

            store.tried(f"{self.address}: {name} cannot be written", write)
            self._copied[name] = version

        _for_each(put, paths)

    def _get(self, wanted: Mapping[str, Path], sizes: Mapping[str, int]) -> None:
        def get(name: str) -> None:
            path = wanted[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            read = partial(store.copy, self.system, f"{self.root}/{name}", path, sizes[name])
            store.tried(f"{self.address}: {name} cannot be copied", read)

        _for_each(get, wanted)

    def _names(self) -> dict[str, int]:
        """Name below the address -> size."""
        address = str(self.address)
        listed = store.tried(f"{address} cannot be listed", lambda: store.files(self.system, self.root, address))
        return {name: size for name, (size, _) in listed.items()}

    def _whole(self, names: Iterable[str]) -> set[int]:
        parts = [name.split("/") for name in names]
        return {int(p[1]) for p in parts if len(p) == 3 and (p[0], p[2]) == (FOLDER, checksums.FILE) and p[1].isdigit()}

    def _records(self) -> Iterator[Path]:
        """The files of the directory beside its checkpoints, without those of running processes and launchers."""
        for path in sorted(self.folder.rglob("*")):
            first = path.relative_to(self.folder).parts[0]
            if path.is_file() and first not in (FOLDER, LOGS) and path.suffix != ".partial" and path.name != lock.FILE:
                yield path

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()


def _for_each(do: Callable[[T], None], items: Iterable[T]) -> None:
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        list(threads.map(do, items))


def _version(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_mtime_ns, about.st_size


@contextmanager
def mirrored(address: str | None, folder: Path) -> Iterator[Mirror]:
    """Fetches what a directory lacks before the run, and copies the directory at its end. All processes call it.

    Yields:
      The mirror, which copies in the first process only.

    Raises:
      CheckpointError: the store cannot be read at the beginning, or lacks something at the end.
    """
    mirror = Mirror(None, folder)

    def fetch() -> None:
        nonlocal mirror
        try:
            mirror = Mirror(address if jax.process_index() == 0 else None, folder)
            mirror.fetch()
        except DataError as error:
            raise CheckpointError(str(error)) from None

    if address:
        on_all(fetch)
    try:
        yield mirror
    finally:
        mirror.push()
    mirror.check()
