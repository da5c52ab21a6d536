"""One of two processes with two devices each: puts batches of every source on its devices and saves the shards.

    python feed_worker.py PROCESS PORT FOLDER START

FOLDER/configs.json: name -> data. Writes FOLDER/PROCESS.npz: `name/step/layout/array/first row/first column` -> shard.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from pydantic import TypeAdapter

from meshpar.data import Data
from meshpar.data.dataset import Dataset
from meshpar.data.packing import ARRAYS
from meshpar.train.loop.feed import local_rows, put

LAYOUTS = {"rows": PartitionSpec(("a", "b")), "rows and columns": PartitionSpec("b", "a"), "whole": PartitionSpec()}
NUM_STEPS = 2


def begin(process: int, port: int) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address, 2, process, coordinator_bind_address=address, initialization_timeout=60, heartbeat_timeout_seconds=20
    )


def shards(dataset: Dataset, layout: str, start: int) -> Iterator[tuple[str, np.ndarray]]:
    """The shards on the devices of this process, which are not neighbours in the mesh."""
    devices = np.array(jax.devices())[[0, 2, 1, 3]].reshape(2, 2)
    sharding = NamedSharding(Mesh(devices, ("a", "b"), axis_types=(AxisType.Auto,) * 2), LAYOUTS[layout])
    shape = (dataset.batch_size, dataset.parts[0].seq_len)
    structs = {name: jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding) for name in ARRAYS}
    rows = local_rows(structs)
    yield f"{layout}/rows", rows
    batches = dataset.batches(start, rows)
    for step in range(start, start + NUM_STEPS):
        batch = next(batches)
        assert all(len(array) == len(rows) for array in batch.values())
        on_devices = put(batch, structs, rows)
        yield f"{step}/{layout}/sum", np.array(jax.jit(lambda x: x.sum())(on_devices["tokens"]))
        for name, array in on_devices.items():
            for shard in array.addressable_shards:
                at = [s.indices(n)[0] for s, n in zip(shard.index, shape, strict=True)]
                yield f"{step}/{layout}/{name}/{at[0]}/{at[1]}", np.array(shard.data)
    batches.close()


def main(process: int, port: int, folder: Path, start: int) -> None:
    begin(process, port)
    found = {}
    for name, config in json.loads((folder / "configs.json").read_text()).items():
        dataset = TypeAdapter(Data).validate_python(config).train(seed=3)
        for layout in LAYOUTS:
            found |= {f"{name}/{key}": shard for key, shard in shards(dataset, layout, start)}
    # The planted fault: this process is a step ahead of the other.
    found |= {f"ahead/{key}": shard for key, shard in shards(dataset, "rows", start + process)}
    np.savez(folder / f"{process}.npz", **found)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    os._exit(0)  # no barrier at which a process would wait for one that failed
