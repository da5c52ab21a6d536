"""Stores arrays in a folder with Orbax: a Zarr folder per array, a file per chunk. No other module imports Orbax.

A chunk is at most one device's shard, and at most `CHUNK_BYTES`, so a device reads little more than its own shard.
Orbax's default, one OCDBT database for all arrays, is off: each file belongs to one region of one array, so a process
verifies only the files that it reads.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np

CHUNK_BYTES = 8 * 2**20
"""A device that needs part of a chunk reads the whole chunk."""
AT_ONCE = 8 * 2**20
"""Bytes restored together. They pass through host memory, of which the allocator does not release all."""


class Writer:
    """Writes dicts of arrays in the background."""

    def __init__(self):
        import orbax.checkpoint as ocp  # imported here because it is slow

        for logger in ("absl", "asyncio"):
            logging.getLogger(logger).addFilter(_is_news)
        self._ocp = ocp
        # Orbax divides an array among its replicas by a program for each shape and device, compiled at the first save.
        handler = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=CHUNK_BYTES)
        on_host = ocp.type_handlers.NumpyHandler()
        handlers = ocp.type_handlers.create_type_handler_registry((jax.Array, handler), (np.ndarray, on_host))
        self._writer = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(use_ocdbt=False, type_handler_registry=handlers)
        )

    def write(self, folder: Path, arrays: Mapping[str, jax.Array]) -> None:
        """Copies arrays to the host and starts to write them; they may be donated at once. All processes call it."""
        options = {path: self._ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for path in arrays}
        self._writer.save(folder, self._ocp.args.PyTreeSave(dict(arrays), options))

    def wait(self) -> None:
        """Returns when all processes have written."""
        self._writer.wait_until_finished()

    def close(self) -> None:
        """Ends the threads. Errors that Orbax still has are those of a save whose error `wait` raised."""
        with suppress(OSError):
            self._writer.close()


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log record of Orbax says more than the error that `Writer` raises."""
    no_news = (
        "Skipping merge of OCDBT",  # logged at each save, because OCDBT is off
        "raised an exception",  # each thread of a failed save logs a traceback; `wait` raises it
        "Handler Commit operations",
        "Task exception was never retrieved",
        "Failed to write metadata",
        "Failed to update metadata",
    )
    return not any(text in str(record.msg) for text in no_news)


def read(folder: Path, structs: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Restores arrays, each device reading its own shard. All processes call it.

    Args:
      structs: the arrays to read, with shardings; the folder may hold others.

    Memory: the shards of this process; during the read also a few times `AT_ONCE`, or the largest array's shards.
    """
    import orbax.checkpoint as ocp

    arrays: dict[str, jax.Array] = {}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as reader:
        for part in _parts({stored(folder, path): struct for path, struct in structs.items()}):
            options = ocp.checkpoint_utils.construct_restore_args(part)
            arrays |= reader.restore(folder, ocp.args.PyTreeRestore(part, options, partial_restore=True))
            jax.block_until_ready(arrays)
    return {path: arrays[stored(folder, path)] for path in structs}


def read_on_host(folder: Path, path: str) -> np.ndarray:
    """One whole array in the dtype in which it was written, whatever `jax_enable_x64` is."""
    import orbax.checkpoint as ocp

    path = stored(folder, path)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as reader:
        options = {path: ocp.RestoreArgs(restore_type=np.ndarray)}
        return reader.restore(folder, ocp.args.PyTreeRestore({path: 0}, options, partial_restore=True))[path]


def stored(folder: Path, path: str) -> str:
    """The name of an array in the folder: until format 2 of checkpoints, `embedding` was called `table`."""
    old = re.sub(r"\bembedding$", "table", path)
    return old if not (folder / path).exists() and (folder / old).exists() else path


def is_chunk(name: str) -> bool:
    """Whether a file such as `params.w/0.3` is a chunk of an array, rather than metadata."""
    return all(part.isdecimal() for part in name.rpartition("/")[2].split("."))


def chunks_read(folder: Path, path: str, struct: jax.ShapeDtypeStruct) -> set[str]:
    """The chunk files that this process reads of an array."""
    path = stored(folder, path)
    chunk = json.loads((folder / path / ".zarray").read_text())["chunks"]
    found: set[str] = set()
    sharding: Any = struct.sharding
    for index in sharding.addressable_devices_indices_map(struct.shape).values():
        ranges = [dim.indices(size) for dim, size in zip(index, struct.shape, strict=True)]
        touched = [range(lo // c, -(-hi // c)) for (lo, hi, _), c in zip(ranges, chunk, strict=True)]
        found |= {f"{path}/{'.'.join(map(str, position)) or 0}" for position in product(*touched)}
    return found


def _parts(structs: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[dict[str, Any]]:
    """Splits a dict into dicts of at most `AT_ONCE` bytes a process, or of one array; the same on all processes."""
    part: dict[str, Any] = {}
    part_bytes = 0.0
    for path, struct in structs.items():
        sharding: Any = struct.sharding
        shard_bytes = int(np.prod(sharding.shard_shape(struct.shape))) * struct.dtype.itemsize
        process_bytes = shard_bytes * len(sharding.device_set) / jax.process_count()  # the mean over processes
        if part and part_bytes + process_bytes > AT_ONCE:
            yield part
            part = {}
            part_bytes = 0.0
        part[path] = struct
        part_bytes += process_bytes
    if part:
        yield part
