"""Two processes save what one restores, restore what one saved, and stop together (gloo, on loopback)."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshpar.checkpoint.checkpoints import checkpoints
from meshpar.checkpoint.lock import hold
from meshpar.checkpoint.saved import find

WORKER = """
import json, os, sys, warnings
from pathlib import Path
import jax

process, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_enable_preemption_service", False)
address = f"127.0.0.1:{port}"
jax.distributed.initialize(
    address, 2, process, coordinator_bind_address=address, heartbeat_timeout_seconds=20, shutdown_timeout_seconds=20
)

import numpy as np
from meshpar.checkpoint import checksums
from meshpar.checkpoint.checkpoints import checkpoints
from meshpar.checkpoint.lock import hold
from meshpar.checkpoint.saved import find
from meshpar.errors import CheckpointError, DamagedWarning
from tests.process.test_checkpoints import mesh, numbers, structs

hashed = []
sha256 = checksums.sha256
checksums.sha256 = lambda path: hashed.append(path.name) or sha256(path)

here = structs(mesh(4), "fsdp")
state = {
    path: jax.make_array_from_callback(x.shape, x.sharding, lambda index, x=x, path=path: numbers()[path][index])
    for path, x in here.items()
}
with checkpoints(folder / "by two") as saved:
    saved.save(1, state)

hashed.clear()
restored = find(folder / "by one" / "1").restore(here)
same = all(
    np.array_equal(shard.data, numbers()[path][shard.index])
    for path, x in restored.items() for shard in x.addressable_shards
)
chunks = sorted(name for name in hashed if name.replace(".", "").isdecimal())
try:
    find(folder / "damaged" / "1").restore(here)
    error = ""
except CheckpointError as raised:
    error = str(raised)

warnings.simplefilter("ignore", DamagedWarning)
with checkpoints(folder / "second damaged") as saved:
    newest = saved.newest(here).step
    saved.save(2, state)
    saved.wait()
    saved.save(3, state)
try:
    with hold(folder / "held"):
        held = ""
except CheckpointError as raised:
    held = str(raised)
report = {"same": same, "chunks": chunks, "error": error, "newest": newest, "held": held}
(folder / f"{process}.json").write_text(json.dumps(report))
os._exit(0)
"""
SHAPES = {"w": (8, 4), "b": (8,), "step": ()}


def numbers() -> dict[str, np.ndarray]:
    return {path: np.random.default_rng(len(path)).normal(size=shape).astype("f4") for path, shape in SHAPES.items()}


def mesh(num_devices: int) -> Any:
    return jax.make_mesh((num_devices,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_devices])


def structs(mesh: Any, axis: str | None) -> dict[str, jax.ShapeDtypeStruct]:
    """Structs whose rows are sharded over the axis."""

    def spec(shape):
        return NamedSharding(mesh, PartitionSpec(axis) if shape else PartitionSpec())

    return {path: jax.ShapeDtypeStruct(shape, np.float32, sharding=spec(shape)) for path, shape in SHAPES.items()}


def run_two(folder: Path) -> list[dict[str, Any]]:
    """Runs WORKER in two processes, neither of which outlives this call."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", WORKER]
    workers = [
        subprocess.Popen([*command, str(i), str(port), str(folder)], stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    try:
        errors = [worker.communicate(timeout=240)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that this process saved on eight devices: `w` and `b` in eight chunks, a row each."""
    folder = tmp_path_factory.mktemp("processes")
    eight = structs(mesh(8), "fsdp")
    with checkpoints(folder / "by one") as saved:
        saved.save(1, {path: jax.device_put(x, eight[path].sharding) for path, x in numbers().items()})
    shutil.copytree(folder / "by one", folder / "damaged")
    chunk = folder / "damaged" / "1" / "state" / "w" / "6.0"  # a row that the second process reads
    chunk.write_bytes(chunk.read_bytes()[:-1])
    shutil.copytree(folder / "by one", folder / "second damaged")
    with checkpoints(folder / "second damaged") as saved:
        saved.save(2, {path: jax.device_put(x, eight[path].sharding) for path, x in numbers().items()})
    (folder / "second damaged" / "2" / "state" / "w" / "6.0").unlink()
    return folder


@pytest.fixture(scope="module")
def reports(folder: Path) -> list[dict[str, Any]]:
    with hold(folder / "held"):
        return run_two(folder)


def test_one_process_restores_what_two_saved(reports: Any, folder: Path):
    restored = find(folder / "by two").restore(structs(mesh(2), "fsdp"))
    for path, x in numbers().items():
        np.testing.assert_array_equal(restored[path], x)


def test_two_processes_restore_what_one_saved(reports: Any):
    assert [report["same"] for report in reports] == [True, True]


def test_each_process_verifies_only_the_chunks_that_it_reads(reports: Any):
    rows = [["0", *(f"{i}" for i in range(4)), *(f"{i}.0" for i in range(4))]]
    rows += [["0", *(f"{i}" for i in range(4, 8)), *(f"{i}.0" for i in range(4, 8))]]
    assert [report["chunks"] for report in reports] == [sorted(each) for each in rows]


def test_damage_that_one_process_finds_stops_both(reports: Any, folder: Path):
    assert reports[0]["error"] == "process 1 cannot continue; its own message says why"
    assert reports[1]["error"].endswith("state/w/6.0\n    does not match its checksum")


def test_both_resume_from_the_same_checkpoint_if_one_finds_the_latest_damaged(reports: Any, folder: Path):
    assert [report["newest"] for report in reports] == [1, 1]
    assert sorted(path.name for path in (folder / "second damaged").iterdir()) == ["2", "2.damaged", "3"]
    find(folder / "second damaged")


def test_both_are_refused_where_another_run_holds_the_folder(reports: Any):
    assert "is in use by process" in reports[0]["held"]
    assert reports[1]["held"] == "process 0 cannot continue; its own message says why"
