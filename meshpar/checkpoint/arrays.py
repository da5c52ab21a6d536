"""Arrays in a folder, by Orbax: a Zarr folder an array, a file a chunk; the only file that knows Orbax.

A chunk is at most what one device held, and never more than `CHUNK_BYTES`: whoever wants a part of an array reads
little else. Zarr's plain files, and not Orbax's default of one database for all arrays, so that a file is known to
belong to an array and to a region of it: what a process verifies is no more than what it reads.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np

CHUNK_BYTES = 8 * 2**20
"""A device that wants a part of a chunk reads the chunk."""
AT_ONCE = 8 * 2**20
"""Bytes that are read together. What is read passes through the host, which keeps some of it as free memory."""


class Writer:
    """Writes dicts of arrays, while the caller goes on."""

    def __init__(self):
        import orbax.checkpoint as ocp  # slow, so not before it is needed

        for logger in ("absl", "asyncio"):
            logging.getLogger(logger).addFilter(_is_news)
        self._ocp = ocp
        self._writer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False))

    def write(self, folder: Path, arrays: Mapping[str, jax.Array]) -> None:
        """Copies arrays to the host, and begins to write them: they may be donated at once. All processes call it."""
        how = {path: self._ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for path in arrays}
        self._writer.save(folder, self._ocp.args.PyTreeSave(dict(arrays), how))

    def wait(self) -> None:
        """Returns when all processes have written."""
        self._writer.wait_until_finished()

    def close(self) -> None:
        self._writer.close()


_NO_NEWS = (
    "Skipping merge of OCDBT",  # at each save there is no database to merge, which is how it was asked to write
    "raised an exception",  # each thread of a save that fails logs a traceback; `wait` raises
    "Handler Commit operations",
    "Task exception was never retrieved",
)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether what Orbax logs says more than `Writer` does."""
    return not any(text in str(record.msg) for text in _NO_NEWS)


def read(folder: Path, structs: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Arrays of the folder, each device reading its own shard. All processes call it.

    Args:
      structs: what to read, with shardings; the folder may hold other arrays beside.

    Memory: the shards of this process; and while it reads, a few times `AT_ONCE`, or those of the largest array.
    """
    import orbax.checkpoint as ocp

    arrays: dict[str, jax.Array] = {}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as reader:
        for part in _parts(structs):
            how = ocp.checkpoint_utils.construct_restore_args(part)
            arrays |= reader.restore(folder, ocp.args.PyTreeRestore(part, how, partial_restore=True))
            jax.block_until_ready(arrays)
    return arrays


def read_on_host(folder: Path, path: str) -> np.ndarray:
    """One array, whole and of the type in which it was written, whatever JAX is set to."""
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as reader:
        how = {path: ocp.RestoreArgs(restore_type=np.ndarray)}
        return reader.restore(folder, ocp.args.PyTreeRestore({path: 0}, how, partial_restore=True))[path]


def is_chunk(name: str) -> bool:
    """Whether a file, `params.w/0.3`, holds numbers, and not what describes them."""
    return all(part.isdecimal() for part in name.rpartition("/")[2].split("."))


def chunks_read(folder: Path, path: str, struct: jax.ShapeDtypeStruct) -> set[str]:
    """The files of an array that hold what this process reads of it."""
    chunk = json.loads((folder / path / ".zarray").read_text())["chunks"]
    found: set[str] = set()
    sharding: Any = struct.sharding
    for index in sharding.addressable_devices_indices_map(struct.shape).values():
        ranges = [dim.indices(size) for dim, size in zip(index, struct.shape, strict=True)]
        touched = [range(lo // c, -(-hi // c)) for (lo, hi, _), c in zip(ranges, chunk, strict=True)]
        found |= {f"{path}/{'.'.join(map(str, position)) or 0}" for position in product(*touched)}
    return found


def _parts(structs: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[dict[str, Any]]:
    """Cuts a dict into dicts of `AT_ONCE` bytes a process, or of one array; all processes cut alike."""
    part: dict[str, Any] = {}
    for path, struct in structs.items():
        if part and sum(map(_process_bytes, [*part.values(), struct])) > AT_ONCE:
            yield part
            part = {}
        part[path] = struct
    if part:
        yield part


def _process_bytes(struct: jax.ShapeDtypeStruct) -> float:
    """Of the shards of a process, in the mean."""
    sharding: Any = struct.sharding
    each = int(np.prod(sharding.shard_shape(struct.shape))) * struct.dtype.itemsize
    return each * len(sharding.device_set) / jax.process_count()
