"""A run resumes from the memory of the hosts, also after one was lost; a damaged copy is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.checkpoint import memory
from meshpar.checkpoint.memory import MEMORY, folder_of, last_step
from meshpar.errors import CheckpointError
from meshpar.launch.workers import Group, Worker
from meshpar.mesh import join
from meshpar.train.copies.copies import Copies
from meshpar.train.copies.parts import Holders
from tests.command import exit_code
from tests.damage import flip_one_bit

# Two processes of two devices, each with a memory of its own, as on two hosts. In each scene they copy a state at steps
# 10 and 20; then a host is lost or a bit flips, and new objects, as after a restart, find what is left.
WORKER = f"""
import json, os, shutil, sys
from pathlib import Path

index = int(os.environ["{join.PROCESS}"])
os.environ["{MEMORY}"] = f"host-{{index}}"
Path(f"host-{{index}}").mkdir()

import jax, jax.numpy as jnp, numpy as np
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import NamedSharding, PartitionSpec as P
from meshpar.mesh import process
from meshpar.mesh.join import join
from meshpar.train.copies.copies import Copies

join()
process.simulate(4)
mesh = jax.make_mesh((2, 2), ("data", "fsdp"), (jax.sharding.AxisType.Auto,) * 2)

def state(step):
    def array(shape, dtype, *spec):
        whole = (np.arange(np.prod(shape, dtype=int)).reshape(shape) + step).astype(dtype)
        return jax.make_array_from_callback(shape, NamedSharding(mesh, P(*spec)), lambda index: whole[index])
    return {{
        "step": array((), "int32"), "everywhere": array((3,), "float32"),
        "cut": array((4, 3), "float32", ("data", "fsdp")), "cut_by_host": array((4,), "int8", "data"),
        "cut_in_host": array((3, 4), jnp.bfloat16, None, "fsdp"),
    }}

structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))

def flip(step, part):
    file, = Path(os.environ["{MEMORY}"]).glob(f"*/*/*/{{step}}.{{part}}")
    content = bytearray(file.read_bytes())
    content[5] ^= 4
    file.write_bytes(content)

def lose():
    shutil.rmtree(Path(os.environ["{MEMORY}"]) / f"meshpar-{{os.getuid()}}")

def nothing(): pass
def host_1_is_lost(): index == 1 and lose()
def a_bit_of_host_1_flips(): index == 1 and flip(20, 1)
def host_1_is_lost_and_a_bit_of_host_0_flips(): lose() if index else flip(20, 1)
def host_1_is_lost_and_all_copies_of_it_are_damaged(): lose() if index else (flip(20, 1), flip(10, 1))

def new(config):
    return Copies(Path("run"), Path("records"), structs, {{"config": config}})

found = {{}}
for scene in (
    nothing, host_1_is_lost, a_bit_of_host_1_flips, host_1_is_lost_and_a_bit_of_host_0_flips,
    host_1_is_lost_and_all_copies_of_it_are_damaged,
):
    before = new(1)
    before.newest(after=20)
    for step in (10, 20):
        before.save(step, state(step))
    before.wait()
    sync_global_devices("saved")
    scene()
    sync_global_devices("lost")
    after = new(1)
    copy = after.newest(after=5)
    restored = copy and after.restore(copy)
    expected = copy and state(copy.step)
    equal = copy and jax.tree.all(jax.tree.map(
        lambda a, b: all(
            np.array_equal(np.asarray(x.data), np.asarray(y.data))
            for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True)
        ), restored, expected))
    found[scene.__name__] = [copy and copy.step, copy and sorted(copy.senders.items()), equal]
found["another config"] = new(2).newest(after=5)
Path(f"found-{{index}}").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[object]]]:
    """What each process found in each scene: the step, who sends to whom, whether the state is equal to the bit."""
    folder = tmp_path_factory.mktemp("copies")
    (folder / "worker.py").write_text(WORKER)
    script = f"cd {folder} && {sys.executable} worker.py"
    ended = Group(["bash", "-c", script], 2, folder, is_quiet=True).run()
    assert ended.code == 0, (folder / "process-0.log").read_text()
    return [json.loads((folder / f"found-{index}").read_text()) for index in range(2)]


@pytest.mark.parametrize(
    ("scene", "expected"),
    [
        ("nothing", [20, [], True]),
        ("host_1_is_lost", [20, [[1, 0]], True]),
        ("a_bit_of_host_1_flips", [20, [[1, 0]], True]),
        ("host_1_is_lost_and_a_bit_of_host_0_flips", [10, [[1, 0]], True]),
        ("host_1_is_lost_and_all_copies_of_it_are_damaged", [None, None, None]),
        ("another config", None),
    ],
)
def test_a_state_returns_to_the_bit_from_the_memory_that_is_left(scene, expected, found):
    assert [each[scene] for each in found] == [expected, expected]


@pytest.mark.parametrize(
    ("parts", "hosts", "distance", "writes"),
    [
        ([0, 1, 2, 3], "aabb", 2, [{0, 2}, {1, 3}, {0, 2}, {1, 3}]),
        ([0, 1, 2, 3], "abab", 1, [{0, 3}, {0, 1}, {1, 2}, {2, 3}]),
        ([0, 1, 2, 3], "aaaa", 0, [{0}, {1}, {2}, {3}]),
        ([0, 1, 0, 1], "aabb", 0, [{0}, {1}, {0}, {1}]),  # copies over `data` are on two hosts already
        ([0, 0, 2, 2], "aabb", 2, [{0, 2}, set(), {0, 2}, set()]),
        ([0], "a", 0, [{0}]),
    ],
)
def test_every_part_is_on_two_hosts_if_there_are_two(parts, hosts, distance, writes):
    holders = Holders(parts, hosts)
    assert holders.distance == distance
    assert [holders.writes(process) for process in range(len(parts))] == writes
    there = {(part, host) for host, each in zip(hosts, writes, strict=True) for part in each}
    assert len(there) == len(set(parts)) * min(2, len(set(hosts)))


def test_hosts_with_different_numbers_of_processes_are_refused():
    with pytest.raises(CheckpointError, match="needs the same number of processes on every host"):
        _ = Holders([0, 1, 2], "aab").distance


CONFIG = """
model: {kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32}
data: {kind: synthetic, batch_size: 8, seq_len: 8}
optim: {kind: adamw, lr: 1e-4}
mesh: {data: 1, fsdp: 4}
rules: [fsdp]
num_steps: 120
log_every: 1
checkpoints: {every: 50, memory_every: 10}
loggers: []
"""


def records(run_dir: Path, kind: str) -> list[dict[str, object]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def train(folder: Path, *words: str) -> Group:
    """Two processes, each with a memory of its own."""
    memory = f"{MEMORY}={folder}/host-${join.PROCESS}"
    command = f"{sys.executable} -m meshpar train {folder}/config.yaml run_dir={folder}/run --devices=4"
    script = f"mkdir -p {folder}/host-${join.PROCESS}; {memory} exec {command} {' '.join(words)}"
    return Group(["bash", "-c", script], 2, folder, is_quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("is_damaged", [False, True])
def test_after_a_host_is_lost_a_run_goes_on_from_its_neighbours_copy_or_from_a_checkpoint(is_damaged, tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    assert exit_code("train", tmp_path / "config.yaml", f"run_dir={tmp_path}/one", "--devices=4") == 0

    def kill(workers: Sequence[Worker]) -> bool:
        steps = [worker.position.step if worker.position else 0 for worker in workers]
        if min(steps) >= 75:
            workers[1].send(signal.SIGKILL)
        return False

    assert train(tmp_path).run(kill).code == 128 + signal.SIGKILL
    shutil.rmtree(tmp_path / "host-1")
    copied = [int(path.name[:-2]) for path in (tmp_path / "host-0").glob("*/*/*/*.1")]
    if is_damaged:
        for path in (tmp_path / "host-0").glob("*/*/*/*.1"):
            flip_one_bit(path)
    ended = train(tmp_path).run()
    assert ended.code == 0, ended.why
    (restored,) = records(tmp_path / "run", "restored")
    if is_damaged:
        assert str(restored["source"]).endswith("/run/checkpoints/50")
        assert "does not match its checksum" in (tmp_path / "process-0.log").read_text()
    else:
        assert restored["source"] == f"the copy of step {max(copied)} in the memory of 2 hosts"
        assert restored["step"] == max(copied) >= 60
    found = {record["step"]: record["loss"] for record in records(tmp_path / "run", "train")}
    expected = {record["step"]: record["loss"] for record in records(tmp_path / "one", "train")}
    assert found.keys() == expected.keys()
    assert max(abs(found[step] - expected[step]) for step in expected) < 1e-6  # pyright: ignore
    assert not list(tmp_path.glob("host-*/*/*"))


def test_copies_count_as_progress(tmp_path, monkeypatch):
    monkeypatch.setenv(MEMORY, str(tmp_path))
    run_dir = tmp_path / "run"
    assert last_step(run_dir) is None
    (folder_of(run_dir) / "layout").mkdir(parents=True)
    (folder_of(run_dir) / "layout" / "40.0").touch()
    assert last_step(run_dir) == 40
    (run_dir / "checkpoints" / "50").mkdir(parents=True)
    assert last_step(run_dir) == 50


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    monkeypatch.setenv(MEMORY, str(tmp_path))
    struct = jax.ShapeDtypeStruct(
        (3,), np.float32, sharding=NamedSharding(jax.make_mesh((8,), "data"), PartitionSpec())
    )
    with closing(Copies(tmp_path / "run", tmp_path / "records", {"x": struct}, {})) as copies:
        yield copies


def test_a_full_memory_ends_the_run_at_the_next_copy(copies, monkeypatch):
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(memory, "write", is_full)
    state = {"x": jax.device_put(np.ones(3, np.float32), copies.layout.structs["x"].sharding)}
    copies.save(1, state)
    with pytest.raises(CheckpointError, match=r"cannot be written to .*: No space left on device; free some memory"):
        copies.save(2, state)


def test_a_run_that_begins_anew_in_the_same_directory_finds_no_copy(copies, tmp_path):
    state = {"x": jax.device_put(np.ones(3, np.float32), copies.layout.structs["x"].sharding)}
    (tmp_path / "records").write_text("first\n")
    copies.save(1, state)
    copies.wait()
    assert copies.newest(after=0).step == 1
    (tmp_path / "records").write_text("second\n")
    assert copies.newest(after=0) is None
    assert not list(copies.folder.glob("*/*"))


@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_folder_that_is_missing_or_belongs_to_somebody_else_is_refused(is_foreign, tmp_path, monkeypatch):
    monkeypatch.setenv(MEMORY, str(tmp_path / "memory"))
    if is_foreign:
        (tmp_path / "memory").mkdir()
        mine = os.getuid()
        monkeypatch.setattr(os, "getuid", iter([mine, mine + 1]).__next__)
    told = "belongs to another user" if is_foreign else "cannot be made: No such file or directory"
    with pytest.raises(CheckpointError, match=told):
        memory.make(folder_of(tmp_path / "run"))
