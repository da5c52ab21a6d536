"""A checkpoint that is on disk: what it says of itself, and its arrays. Reading needs no folder that can be written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshpar.checkpoint import arrays, checksums
from meshpar.checkpoint.selection import EVERYTHING, Selection, Side, select
from meshpar.errors import CheckpointError
from meshpar.tree import flatten_with_paths, map_with_path

STATE, META, FOLDER = "state", "meta.json", "checkpoints"


@dataclass(frozen=True)
class Saved:
    """One checkpoint.

    Args:
      folder: of one step; `find` knows it from a run's.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> from meshpar.checkpoint.checkpoints import checkpoints
      >>> state = {"params": {"body": jnp.arange(4.0), "head": jnp.ones(2)}, "step": jnp.int32(3)}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with checkpoints(Path(folder)) as saved:
      ...         saved.save(3, state)
      ...     there = find(Path(folder))
      ...     body = there.restore(jax.eval_shape(lambda: state), take=["params.body"])["params"]["body"]
      >>> there.step, body
      (3, Array([0., 1., 2., 3.], dtype=float32))
    """

    folder: Path

    @cached_property
    def meta(self) -> dict[str, Any]:
        """What stands in `meta.json`: step, time, config, arrays, data position, random keys, metric."""
        checksums.verify(self.folder, self._sums, [META])
        return json.loads((self.folder / META).read_text())

    @property
    def step(self) -> int:
        return self.meta["step"]

    @property
    def described(self) -> dict[str, str]:
        """Path -> type and shape: `params.embed.table` -> `float32[257, 64]`."""
        return {path: f"{array['dtype']}{array['shape']}" for path, array in self.meta["arrays"].items()}

    @cached_property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum((self.folder / name).stat().st_size for name in self._sums if (self.folder / name).is_file())

    def select(
        self,
        abstract: Any,
        take: Sequence[str] = EVERYTHING,
        leave: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
    ) -> Selection:
        """What `restore` would take; raises as it does. Reads no array.

        Args:
          config: of the run, as JSON data: an error lists the keys by which it differs.
        """
        mine = Side(self.described, self.meta["config"] if config else {})
        return select(mine, Side(describe(abstract), config or {}), take, leave, str(self.folder))

    def restore(self, abstract: Any, take: Sequence[str] = EVERYTHING, leave: Sequence[str] = ()) -> Any:
        """The state, each device reading its own shard: all that `take` matches, less what `leave` does.

        All processes call it.

        Args:
          abstract: tree of `ShapeDtypeStruct`s; their shardings may be other than those of the state that was saved.
          take, leave: globs of paths, such as `params.**`.

        Returns:
          The tree with arrays. What was not taken is the `ShapeDtypeStruct` that it was.

        Raises:
          CheckpointError: a file was changed; or it lists each array that is not as in `abstract`, or each glob that
            matches nothing.

        Memory: see `arrays.read`. Files are verified before any is restored, and no more of them than are read.
        """
        wanted = flatten_with_paths(abstract)
        structs = {path: _placed(wanted[path]) for path in self.select(abstract, take, leave).taken}
        _on_all(lambda: self.verify(structs))
        got = arrays.read(self.folder / STATE, structs)
        return map_with_path(lambda path, struct: got.get(path, struct), abstract)

    def verify(self, structs: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        """Compares the checksums of the files that this process reads, to have its shards of `structs`."""
        prefix = f"{STATE}/"
        chunks = {name for name in self._sums if name.startswith(prefix) and arrays.is_chunk(name)}
        checksums.verify(self.folder, self._sums, self._sums.keys() - chunks)
        read = {
            prefix + name for path, s in structs.items() for name in arrays.chunks_read(self.folder / STATE, path, s)
        }
        checksums.verify(self.folder, self._sums, sorted(chunks & read))

    def on_host(self, path: str) -> np.ndarray:
        """One array, whole."""
        own = [name for name in self._sums if name.startswith(f"{STATE}/{path}/")]
        checksums.verify(self.folder, self._sums, own)
        return arrays.read_on_host(self.folder / STATE, path)

    @cached_property
    def _sums(self) -> dict[str, str]:
        return checksums.read(self.folder)


def steps(directory: Path) -> list[int]:
    """The steps of which there are whole checkpoints in a folder."""
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted(int(path.name) for path in found if path.name.isdecimal())


def find_all(folder: Path) -> list[Saved]:
    """The checkpoints of a run, by its folder, that of its checkpoints, or that of one of them.

    Raises:
      CheckpointError: there is none.
    """
    folder = folder.absolute()
    if (folder / META).is_file():
        return [Saved(folder)]
    for directory in (folder, folder / FOLDER):
        if found := steps(directory):
            return [Saved(directory / str(step)) for step in found]
    there = "is no checkpoint, and holds none" if folder.exists() else "does not exist"
    raise CheckpointError(f"{folder} {there}")


def find(folder: Path) -> Saved:
    """The latest of `find_all`."""
    return find_all(folder)[-1]


def describe(state: Any) -> dict[str, str]:
    """Path -> type and shape of each array of a tree."""
    return {path: f"{np.dtype(x.dtype)}{list(x.shape)}" for path, x in flatten_with_paths(state).items()}


def _on_all(check: Callable[[], None]) -> None:
    """Raises on every process if one of them does: else the others would wait for it in the next collective."""
    found: CheckpointError | None = None
    try:
        check()
    except CheckpointError as error:
        found = error
    if jax.process_count() > 1:
        raised = np.flatnonzero(multihost_utils.process_allgather(np.int32(found is not None)))
        if len(raised) and found is None:
            found = CheckpointError(f"process {raised[0]} cannot restore; it says why")
    if found:
        raise found


def _placed(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """On the first device, if it is not said where."""
    if struct.sharding is not None:
        return struct
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=device)
