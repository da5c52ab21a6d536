"""Checkpoints are restored bitwise on any mesh, and are either whole or absent."""

from __future__ import annotations

import errno
import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshpar.checkpoint.arrays import CHUNK_BYTES
from meshpar.checkpoint.checkpoints import CheckpointMetadata, Checkpoints, checkpoints
from meshpar.checkpoint.retention import Retention
from meshpar.checkpoint.saved import find, find_all
from meshpar.errors import DamagedError
from meshpar.train.state import TrainState
from meshpar.tree import flatten_with_paths

pytestmark = pytest.mark.matrix

ABOUT = CheckpointMetadata({"model": {"kind": "toy"}}, {"w": ("embed", "mlp")}, seed=5, batch_size=16)


def new_state(params: Any) -> TrainState:
    return TrainState(jnp.int32(7), params, optax.adamw(1e-3).init(params), jnp.int32(1))


def toy_state() -> TrainState:
    weights = jax.random.normal(jax.random.key(0), (8, 4))
    return new_state({"blocks": {"w": weights, "b": weights[0].astype(jnp.bfloat16)}})


def on_mesh(tree: Any, shape: tuple[int, int], spec: PartitionSpec) -> Any:
    """Structs of `tree`, matrices sharded by `spec`, all else replicated."""
    devices = jax.devices()[: shape[0] * shape[1]]
    mesh = jax.make_mesh(shape, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=devices)

    def struct(x: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec if x.ndim == 2 else PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(struct, tree)


def put(tree: Any, structs: Any) -> Any:
    return jax.tree.map(lambda x, struct: jax.device_put(x, struct.sharding), tree, structs)


def assert_same(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Checkpoints]:
    with checkpoints(tmp_path / "checkpoints", about=ABOUT) as opened:
        yield opened


@pytest.mark.parametrize("shape", [(4, 2), (2, 2), (1, 8), (1, 1)])
def test_a_state_is_restored_bitwise_on_any_mesh(saved: Checkpoints, shape: tuple[int, int]):
    state = toy_state()
    saved.save(7, put(state, on_mesh(state, (4, 2), PartitionSpec("data", "fsdp"))))
    saved.wait()
    wanted = on_mesh(state, shape, PartitionSpec("fsdp"))
    got = saved.restore(wanted)
    assert_same(got, state)
    assert all(x.sharding == s.sharding for x, s in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True))


def test_control_a_changed_state_is_seen(saved: Checkpoints):
    state = toy_state()
    saved.save(7, state)
    saved.wait()
    got = saved.restore(on_mesh(state, (1, 8), PartitionSpec()))
    got.params["blocks"]["w"] = got.params["blocks"]["w"].at[3, 2].add(1e-6)
    with pytest.raises(AssertionError):
        assert_same(got, state)


def test_a_state_that_is_donated_while_it_is_written_is_saved_as_it_was(saved: Checkpoints):
    big = {"w": jnp.arange(2.0**20).reshape(1024, 1024)}
    structs = on_mesh(big, (4, 2), PartitionSpec("data", "fsdp"))
    expected = np.asarray(big["w"])
    state = put(big, structs)
    step = jax.jit(lambda s: {"w": s["w"] * -2.0}, donate_argnums=0).lower(structs).compile()
    saved.save(1, state)
    for _ in range(3):
        state = step(state)
    saved.wait()
    np.testing.assert_array_equal(np.asarray(saved.restore(structs)["w"]), expected)


def test_saving_moves_nothing_implicitly_between_host_and_devices(saved: Checkpoints):
    state = toy_state()
    with jax.transfer_guard("disallow"):
        saved.save(1, state)
        saved.wait()
        saved.restore(on_mesh(state, (1, 8), PartitionSpec()))


def test_the_latest_steps_are_kept(saved: Checkpoints):
    assert saved.latest() is None
    for step in (9, 10, 100):
        saved.save(step, {"w": jnp.float32(step)})
    saved.wait()
    assert saved.latest() == 100
    assert names(saved.directory) == [".lock", "10", "100"]


def test_closing_waits_until_the_checkpoint_is_on_disk(tmp_path: Path):
    with checkpoints(tmp_path) as first:
        first.save(3, {"w": jnp.float32(1)})
    with checkpoints(tmp_path) as second:
        assert second.latest() == 3


def test_a_save_that_fails_twice_raises_once_and_without_a_traceback(tmp_path: Path, monkeypatch, capfd):
    """On a full disk Orbax fails to write an array and its own metadata, in threads of their own."""

    def write(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with checkpoints(tmp_path / "checkpoints") as saved:
        for name in ("write", "update"):
            monkeypatch.setattr(f"orbax.checkpoint._src.metadata.checkpoint._BlockingMetadataStore.{name}", write)
            monkeypatch.setattr(f"orbax.checkpoint._src.metadata.checkpoint._MetadataStoreImpl.{name}", write)
        saved.save(1, {"w": jnp.zeros(4)})
        with pytest.raises(OSError, match="No space left on device"):
            saved.wait()
    assert saved.latest() is None
    assert "Traceback" not in capfd.readouterr().err


def test_meta_describes_the_arrays_and_the_position_of_the_run(saved: Checkpoints):
    before = datetime.now(UTC).replace(microsecond=0)
    saved.save(7, {"step": jnp.int32(7), "w": jnp.zeros((2, 3), jnp.bfloat16)}, {"loss": 2.5})
    saved.wait()
    meta = json.loads((saved.directory / "7" / "meta.json").read_text())
    assert before <= datetime.fromisoformat(meta.pop("saved")) <= datetime.now(UTC)
    assert meta == {
        "format": 3,
        "step": 7,
        "config": {"model": {"kind": "toy"}},
        "arrays": {
            "step": {"dtype": "int32", "shape": [], "dims": None},
            "w": {"dtype": "bfloat16", "shape": [2, 3], "dims": ["embed", "mlp"]},
        },
        "data": {"next_batch": 7, "rows_read": 112, "seed": 5},
        "random": {"seed": 5, "impl": "threefry2x32", "folded_in": 7},
        "metric": {"name": "loss", "best": "lowest", "value": 2.5},
    }


KILLED = """
import os, signal, sys, time
from pathlib import Path
import jax.numpy as jnp
from meshpar.checkpoint import checkpoints, checksums

die = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
saved = checkpoints.Checkpoints(Path(sys.argv[1]))
saved.save(1, {"w": jnp.float32(1), "big": jnp.zeros(10)})
saved.wait()
if sys.argv[2] == "in the arrays":
    saved.save(2, {"w": jnp.float32(2), "big": jnp.zeros(2**26)})
    while not list(saved.directory.glob("2.*.partial")):  # a thread of Orbax makes it
        time.sleep(1e-4)
    die()
if sys.argv[2] == "in the checksums":  # the arrays of step 2 are on disk, their checksums are not
    checksums.write = die
if sys.argv[2] == "before the rename":
    checkpoints.sync_tree = die
if sys.argv[2] == "after the rename":
    checkpoints.sync = die
saved.save(2, {"w": jnp.float32(2), "big": jnp.zeros(10)})
saved.wait()
"""


@pytest.mark.slow
def test_a_save_killed_after_its_rename_is_whole(tmp_path: Path):
    words = [sys.executable, "-c", KILLED, str(tmp_path), "after the rename"]
    assert subprocess.run(words, capture_output=True, timeout=100).returncode == -signal.SIGKILL
    assert not list(tmp_path.glob("*.partial"))
    find(tmp_path).verify()
    assert find(tmp_path).on_host("w") == 2


@pytest.mark.parametrize(
    "when", ["in the arrays", "in the checksums", pytest.param("before the rename", marks=pytest.mark.slow)]
)
def test_a_killed_save_leaves_the_checkpoint_before_it(when: str, tmp_path: Path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), when], capture_output=True, timeout=100)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    (partial,) = tmp_path.glob("2.*.partial")
    assert (partial / "state").is_dir() == (when != "in the arrays")
    wanted = {"w": jax.ShapeDtypeStruct((), jnp.float32)}
    with checkpoints(tmp_path) as saved:
        assert saved.latest() == 1
        assert find(tmp_path).restore(wanted, include=["w"])["w"] == 1
        saved.save(2, {"w": jnp.float32(4)})
        saved.wait()
        assert saved.latest() == 2
        assert saved.restore(wanted)["w"] == 4
    assert names(tmp_path) == ["1", "2"]


def test_the_best_are_kept_beside_the_latest(tmp_path: Path):
    with checkpoints(tmp_path, Retention(keep=1, keep_best=2)) as saved:
        for step, loss in enumerate([3.0, 1.0, float("nan"), 2.0, 4.0, 5.0], start=1):
            saved.save(step, {"w": jnp.float32(step)}, {"loss": loss})
        saved.save(7, {"w": jnp.float32(7)})  # not evaluated
    assert [found.step for found in find_all(tmp_path)] == [2, 4, 7]


def test_the_highest_can_be_the_best(tmp_path: Path):
    with checkpoints(tmp_path, Retention(keep=1, keep_best=1, metric="accuracy", best="highest")) as saved:
        for step, accuracy in enumerate([0.1, 0.9, 0.5], start=1):
            saved.save(step, {"w": jnp.float32(step)}, {"accuracy": accuracy, "loss": -accuracy})
    assert [found.step for found in find_all(tmp_path)] == [2, 3]


def test_a_checkpoint_that_cannot_be_read_is_not_removed(tmp_path: Path):
    with checkpoints(tmp_path, Retention(keep=1)) as saved:
        saved.save(1, {"w": jnp.float32(1)})
        saved.wait()
        (tmp_path / "1" / "meta.json").write_text("{")
        for step in (2, 3):
            saved.save(step, {"w": jnp.float32(step)})
    assert names(tmp_path) == ["1", "3"]


# A part of a checkpoint ----------------------------------------------------------------------------------------------


def test_a_part_is_restored_and_the_rest_is_left_alone(saved: Checkpoints):
    state = toy_state()
    saved.save(7, state)
    saved.wait()
    wanted = on_mesh(state, (1, 8), PartitionSpec("fsdp"))
    checkpoint = find(saved.directory)
    selection = checkpoint.select(wanted, ["params.**", "step"], ["params.blocks.b"])
    assert selection.restored == ["params.blocks.w", "step"]
    assert (
        set(selection.initialized) == set(selection.ignored) == set(flatten_with_paths(state)) - set(selection.restored)
    )
    got = checkpoint.restore(wanted, ["params.**", "step"], ["params.blocks.b"])
    np.testing.assert_array_equal(got.params["blocks"]["w"], state.params["blocks"]["w"])
    assert got.step == 7
    assert got.params["blocks"]["b"] == wanted.params["blocks"]["b"]
    assert got.opt_state == wanted.opt_state


def test_parameters_are_read_without_the_rest_of_the_state(saved: Checkpoints):
    """Only their files are verified, so damage elsewhere is no error."""
    state = toy_state()
    saved.save(7, state)
    saved.wait()
    for folder in (saved.directory / "7" / "state").glob("opt_state.*.mu.*"):
        for chunk in folder.glob("[0-9]*"):
            chunk.write_bytes(b"damaged")
    params = on_mesh(state.params, (1, 8), PartitionSpec("fsdp"))
    include = ["params.**"]
    assert_same(find(saved.directory, include).restore({"params": params}, include)["params"], state.params)
    with pytest.raises(DamagedError, match="damaged"):
        saved.restore(on_mesh(state, (1, 8), PartitionSpec("fsdp")))


def test_a_state_without_extra_state_is_restored_from_a_checkpoint_without_that_field(saved: Checkpoints):
    state = toy_state()
    saved.save(7, {name: getattr(state, name) for name in ("step", "params", "opt_state", "skipped")})
    saved.wait()
    assert_same(saved.restore(on_mesh(state, (1, 8), PartitionSpec())), state)


def test_a_large_array_is_stored_in_chunks_of_bounded_size(tmp_path: Path):
    whole = jax.device_put(jnp.zeros((2**12, 2**10)), jax.devices()[0])
    with checkpoints(tmp_path) as saved:
        saved.save(1, {"w": whole})
    chunk = json.loads((tmp_path / "1" / "state" / "w" / ".zarray").read_text())["chunks"]
    assert 4 * math.prod(chunk) <= CHUNK_BYTES < whole.nbytes
