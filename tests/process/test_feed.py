"""Two processes put the same batches on their devices as one does, and each reads its own rows alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshpar.data.corpus import Batching
from meshpar.data.dataset import Dataset
from meshpar.data.packing import ARRAYS
from meshpar.train.loop.feed import local_rows, put
from tests.process.feed_worker import LAYOUTS, NUM_STEPS
from tests.sources import BATCHES, mixture, write_sources

ROOT = Path(__file__).parents[2]
START = int(np.random.default_rng(5).integers(1, 1000))
LIMIT_S = 240
NAMES = ["text", "jsonl", "parquet", "arrow of ids", "npy", "matrix", "synthetic", "mixture"]
Shards = dict[str, np.ndarray]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_two(folder: Path) -> None:
    """Runs two workers, neither of which outlives this call."""
    worker = str(ROOT / "tests" / "process" / "feed_worker.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    port = str(free_port())
    both = [
        subprocess.Popen([sys.executable, worker, str(i), port, str(folder), str(START)], env=environment)
        for i in range(2)
    ]
    try:
        assert [process.wait(LIMIT_S) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Batching]:
    folder = tmp_path_factory.mktemp("sources")
    found = write_sources(folder)
    return found | {"mixture": mixture(folder, found)}


@pytest.fixture(scope="module")
def shards(sources: dict[str, Batching], tmp_path_factory: pytest.TempPathFactory) -> list[Shards]:
    """The shards on the devices of each process."""
    folder = tmp_path_factory.mktemp("shards")
    configs = {name: sources[name].model_dump(mode="json") for name in NAMES}
    (folder / "configs.json").write_text(json.dumps(configs))
    run_two(folder)
    return [dict(np.load(folder / f"{i}.npz")) for i in range(2)]


def assert_is_the_batch(shards: list[Shards], name: str, layout: str, dataset: Dataset) -> None:
    """The shards of both processes make up the batches of one, and overlap only as copies of the whole."""
    for step in range(START, START + NUM_STEPS):
        for array, expected in dataset[step].items():
            seen = np.zeros_like(expected)
            prefix = f"{name}/{step}/{layout}/{array}/"
            for part, at in [found for process in shards for found in parts(process, prefix)]:
                assert np.array_equal(part, expected[at])
                seen[at] += 1
            assert (seen == seen[0, 0]).all() and seen[0, 0] >= 1
        sums = [int(process[f"{name}/{step}/{layout}/sum"]) for process in shards]
        assert sums == [dataset[step]["tokens"].sum()] * 2


def parts(shards: Shards, prefix: str) -> Iterator[tuple[np.ndarray, tuple[slice, slice]]]:
    for key, part in shards.items():
        if key.startswith(prefix):
            row, column = map(int, key.removeprefix(prefix).split("/"))
            yield part, (slice(row, row + part.shape[0]), slice(column, column + part.shape[1]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_have_the_batches_of_one(name: str, layout: str, sources, shards: list[Shards]):
    assert_is_the_batch(shards, name, layout, sources[name].train(seed=3))


def test_each_process_reads_the_rows_of_its_own_devices(shards: list[Shards]):
    assert [process["npy/rows/rows"].tolist() for process in shards] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [process["npy/whole/rows"].tolist() for process in shards] == [list(range(8))] * 2


def test_control_a_process_that_is_a_step_ahead_is_seen(sources: dict[str, Batching], shards: list[Shards]):
    with pytest.raises(AssertionError):
        assert_is_the_batch(shards, "ahead", "rows", sources[NAMES[-1]].train(seed=3))


@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_one_process_has_the_same_batches_on_any_number_of_devices(num_devices: int, sources: dict[str, Batching]):
    mesh = jax.make_mesh((num_devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:num_devices])
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    shape = (BATCHES["batch_size"], BATCHES["seq_len"])
    structs = {name: jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding) for name in ARRAYS}
    dataset = sources["mixture"].train(seed=3)
    with jax.transfer_guard("disallow"):
        batch = put(dataset[START], structs, local_rows(structs))
    for name, array in batch.items():
        assert array.sharding == sharding
        assert np.array_equal(jax.device_get(array), dataset[START][name])
