"""Reads a checkpoint on disk: its metadata and its arrays. The folder may be read-only."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pydantic

from meshpar.checkpoint import arrays, checksums, meta
from meshpar.checkpoint.agree import on_all
from meshpar.checkpoint.selection import EVERYTHING, Selection, select
from meshpar.config import changed
from meshpar.errors import CheckpointError, DamagedError, DamagedWarning, DataError, Problems
from meshpar.regular_files import nearby, remote
from meshpar.store import local
from meshpar.tree import flatten_with_paths, map_with_path, matching

STATE = "state"
META = "meta.json"
FOLDER = "checkpoints"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    Args:
      folder: the folder of one step; `find` finds it in a run directory.

    Examples:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> from meshpar.checkpoint.checkpoints import checkpoints
      >>> state = {"params": {"body": jnp.arange(4.0), "head": jnp.ones(2)}, "step": jnp.int32(3)}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with checkpoints(Path(folder)) as saved:
      ...         saved.save(3, state)
      ...     there = find(Path(folder))
      ...     body = there.restore(jax.eval_shape(lambda: state), include=["params.body"])["params"]["body"]
      >>> there.step, body
      (3, Array([0., 1., 2., 3.], dtype=float32))
    """

    folder: Path

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The content of `meta.json`: step, time, config, arrays, data position, random keys, metric.

        Raises:
          DamagedError: it cannot be read, or does not match its checksum.
          CheckpointError: the folder's name is another step, or a newer meshpar wrote it.
        """
        self._compare([META])
        path = self.folder / META
        try:
            found = meta.parse(path.read_bytes(), path)
        except pydantic.ValidationError as invalid:
            problems = Problems()
            for error in invalid.errors(include_url=False):
                problems.add(f"{path}: {'.'.join(map(str, error['loc']))}", error["msg"])
            raise self._damaged(problems) from None
        if _is_step(self.folder.name) and int(self.folder.name) != found["step"]:
            right = self.folder.with_name(str(found["step"]))
            raise CheckpointError(f"{self.folder} holds step {found['step']}: rename it to {right}, or move it away")
        return found

    @property
    def step(self) -> int:
        return self.meta["step"]

    @property
    def described(self) -> dict[str, str]:
        """Path -> dtype and shape: `params.embedding` -> `float32[257, 64]`."""
        return {path: f"{array['dtype']}{array['shape']}" for path, array in self.meta["arrays"].items()}

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum((self.folder / name).stat().st_size for name in self._files if (self.folder / name).is_file())

    @property
    def num_files(self) -> int:
        """The number of files, without `sha256.json`."""
        return len(self._files)

    def check_sizes(self) -> None:
        """Checks that no file is missing or truncated, without reading the arrays.

        Raises:
          DamagedError, CheckpointError: see `meta`.
        """
        _ = self.meta
        if problems := checksums.compare_sizes(self.folder, self._files):
            raise self._damaged(problems)

    def verify(self, include: Sequence[str] = EVERYTHING) -> None:
        """Compares the checksums of all files of the arrays that `include` matches.

        Raises:
          DamagedError, CheckpointError: see `meta`.
        """
        _ = self.meta
        chunks = self._chunks()
        self._compare(self._files.keys() - chunks)
        paths = {name: name.removeprefix(f"{STATE}/").rpartition("/")[0] for name in chunks}
        matched = {path for glob in include for path in matching(set(paths.values()), glob)}
        self._compare(name for name, path in paths.items() if path in matched)

    def select(
        self,
        abstract: Any,
        include: Sequence[str] = EVERYTHING,
        exclude: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
    ) -> Selection:
        """The arrays that `restore` would restore; raises the same errors. Reads no array.

        Args:
          config: the run's config, as JSON data; an error lists the keys that differ from the checkpoint's.
        """
        changes = changed(self.meta["config"], config) if config else {}
        return select(self.described, describe(abstract), include, exclude, changes, str(self.folder))

    def restore(self, abstract: Any, include: Sequence[str] = EVERYTHING, exclude: Sequence[str] = ()) -> Any:
        """Restores the arrays that `include` matches and `exclude` does not. Each device reads its own shard.

        All processes call it.

        Args:
          abstract: tree of `ShapeDtypeStruct`s; their shardings may differ from those of the saved state.
          include, exclude: globs of paths, such as `params.**`.

        Returns:
          The tree with arrays in place of the restored structs, and the other structs unchanged.

        Raises:
          CheckpointError: a file is damaged; or it lists each array that differs from `abstract`, or each glob that
            matches nothing.

        Memory: see `arrays.read`. Each file that will be read is verified before the first array is restored.
        """
        on_all(lambda: self.check(abstract, include, exclude))
        structs = _placed(abstract, self.select(abstract, include, exclude).restored)
        restored = arrays.read(self.folder / STATE, structs)
        return map_with_path(lambda path, struct: restored.get(path, struct), abstract)

    def check(
        self,
        abstract: Any,
        include: Sequence[str] = EVERYTHING,
        exclude: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises the errors of `restore`, on this process alone. Each file is verified once."""
        structs = _placed(abstract, self.select(abstract, include, exclude, config).restored)
        chunks = self._chunks()
        self._compare(self._files.keys() - chunks)
        read = {
            f"{STATE}/{name}"
            for path, struct in structs.items()
            for name in arrays.chunks_read(self.folder / STATE, path, struct)
        }
        self._compare(chunks & read)

    def on_host(self, path: str) -> np.ndarray:
        """One whole array."""
        name_there = arrays.stored(self.folder / STATE, path)
        self._compare(name for name in self._files if name.startswith(f"{STATE}/{name_there}/"))
        return arrays.read_on_host(self.folder / STATE, path)

    def _chunks(self) -> set[str]:
        return {name for name in self._files if name.startswith(f"{STATE}/") and arrays.is_chunk(name)}

    def _compare(self, names: Iterable[str]) -> None:
        """Raises if one of these files is damaged. A file is read once."""
        new = sorted(set(names) - self._verified)
        if problems := checksums.compare(self.folder, self._files, new):
            raise self._damaged(problems)
        self._verified.update(new)

    def _damaged(self, problems: Problems) -> DamagedError:
        heading = f"the checkpoint {self.folder} is damaged"
        if _is_step(self.folder.name):
            before = [step for step in steps(self.folder.parent) if step < int(self.folder.name)]
            folders = (self.folder.with_name(str(step)) for step in reversed(before))
            earlier = next(filter(_seems_whole, folders), None)
            heading += f"; the one before it is {earlier}" if earlier else "; there is no whole one before it"
        return DamagedError("\n".join([f"{heading}:", *map(str, problems.found)]))

    @cached_property
    def _verified(self) -> set[str]:
        return set()

    @cached_property
    def _files(self) -> dict[str, checksums.File]:
        try:
            return checksums.read(self.folder)
        except FileNotFoundError:
            what = "is missing"
        except (OSError, ValueError):
            what = "is damaged"
        problems = Problems()
        problems.add(str(self.folder / checksums.FILE), f"{what}, so no file can be verified")
        raise self._damaged(problems)


def steps(directory: Path) -> list[int]:
    """The steps of the checkpoints in a folder, sorted."""
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted(int(path.name) for path in found if _is_step(path.name) and path.is_dir())


def find_all(folder: Path) -> list[Checkpoint]:
    """The checkpoints of a run.

    Args:
      folder: the run's folder, the folder of its checkpoints, or one checkpoint; also at an address of a store, from
        which it is copied.

    Raises:
      CheckpointError: there is none, or the store cannot be read.
    """
    try:
        folder = local(folder)
    except DataError as error:
        raise CheckpointError(str(error)) from None
    if problem := remote(folder):
        raise CheckpointError("; ".join(problem))
    folder = folder.absolute()
    if (folder / META).is_file() or (folder / checksums.FILE).is_file():
        return [Checkpoint(folder)]
    for directory in (folder, folder / FOLDER):
        if found := steps(directory):
            return [Checkpoint(directory / str(step)) for step in found]
    there = "is no checkpoint, and holds none" if folder.exists() else "does not exist"
    near = "" if folder.exists() else nearby(folder)
    raise CheckpointError(f"{folder} {there}" + (f"; {near}" if near else ""))


def find(folder: Path, include: Sequence[str] = EVERYTHING) -> Checkpoint:
    """The last undamaged checkpoint of `find_all`. A folder that is a checkpoint itself is returned unchecked.

    Args:
      include: globs of the arrays that will be read; other arrays are not verified.

    Raises:
      CheckpointError: there is none, or all are damaged.
    """
    found = find_all(folder)
    if found[0].folder == folder.absolute():
        return found[0]
    return newest_whole(found, lambda saved: saved.verify(include))[0]


def newest_whole(
    found: Sequence[Checkpoint], check: Callable[[Checkpoint], None]
) -> tuple[Checkpoint, dict[Path, str]]:
    """The last undamaged checkpoint, and folder -> damage of each later one. All processes find the same one.

    It warns about each damaged checkpoint.

    Args:
      found: in order of steps.
      check: raises `DamagedError` for a damaged checkpoint; any other error ends the search.

    Raises:
      DamagedError: all are damaged. It lists the damage to each.
    """
    damaged: dict[Path, str] = {}
    for saved in reversed(found):
        try:
            on_all(lambda saved=saved: check(saved))
        except DamagedError as error:
            damaged[saved.folder] = str(error)
            continue
        for damage in damaged.values():
            warnings.warn(f"{damage}\n{saved.folder} is used instead", DamagedWarning, stacklevel=3)
        return saved, damaged
    where = found[-1].folder.parent
    fix = f"no checkpoint in {where} is whole; set another run_dir, or move {where} away to start over"
    raise DamagedError("\n".join([*damaged.values(), fix]))


def describe(state: Any) -> dict[str, str]:
    """Path -> dtype and shape of each array of a tree."""
    return {path: f"{np.dtype(x.dtype)}{list(x.shape)}" for path, x in flatten_with_paths(state).items()}


def _placed(abstract: Any, paths: Iterable[str]) -> dict[str, jax.ShapeDtypeStruct]:
    """The structs at these paths; those without a sharding are placed on the first device."""
    wanted = flatten_with_paths(abstract)
    found: dict[str, jax.ShapeDtypeStruct] = {}
    for path in paths:
        struct = wanted[path]
        sharding = struct.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        found[path] = jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)
    return found


def _is_step(name: str) -> bool:
    return name.isdecimal() and str(int(name)) == name


def _seems_whole(folder: Path) -> bool:
    """Whether a checkpoint's metadata and file sizes are right; the arrays are not read."""
    try:
        files = checksums.read(folder)
    except (OSError, ValueError):
        return False
    return META in files and not (checksums.compare(folder, files, [META]) or checksums.compare_sizes(folder, files))
