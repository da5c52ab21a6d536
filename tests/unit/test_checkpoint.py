"""Checkpoints: bitwise, on another mesh, whole or not there."""

from __future__ import annotations

import json
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

from meshpar.checkpoint.checkpoints import About, Checkpoints, checkpoints
from meshpar.train.state import TrainState

ABOUT = About({"model": {"kind": "toy"}}, {"w": ("embed", "mlp")}, seed=5, batch_size=16)


def new_state(params: Any) -> TrainState:
    return TrainState(jnp.int32(7), params, optax.adamw(1e-3).init(params), jnp.int32(1))


def toy_state() -> TrainState:
    weights = jax.random.normal(jax.random.key(0), (8, 4))
    return new_state({"blocks": {"w": weights, "b": weights[0].astype(jnp.bfloat16)}})


def on_mesh(tree: Any, shape: tuple[int, int], spec: PartitionSpec) -> Any:
    """Structs of `tree`, matrices sharded by `spec`, all else whole."""
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


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Checkpoints]:
    with checkpoints(tmp_path / "checkpoints", about=ABOUT) as opened:
        yield opened


@pytest.mark.parametrize("shape", [(4, 2), (2, 2), (1, 8), (1, 1)])
def test_a_state_comes_back_bitwise_on_whatever_mesh_is_asked_for(saved: Checkpoints, shape: tuple[int, int]):
    state = toy_state()
    saved.save(7, put(state, on_mesh(state, (4, 2), PartitionSpec("data", "fsdp"))))
    saved.wait()
    wanted = on_mesh(state, shape, PartitionSpec("fsdp"))
    got = saved.restore(wanted)
    assert_same(got, state)
    assert all(x.sharding == s.sharding for x, s in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True))


def test_control_another_state_is_told_from_the_one_that_was_saved(saved: Checkpoints):
    state = toy_state()
    saved.save(7, state)
    saved.wait()
    got = saved.restore(on_mesh(state, (1, 8), PartitionSpec()))
    got.params["blocks"]["w"] = got.params["blocks"]["w"].at[3, 2].add(1e-6)
    with pytest.raises(AssertionError):
        assert_same(got, state)


def test_what_was_saved_is_the_state_at_that_time_though_it_is_donated_while_it_is_written(saved: Checkpoints):
    big = {"w": jnp.arange(2.0**20).reshape(1024, 1024)}
    structs = on_mesh(big, (4, 2), PartitionSpec("data", "fsdp"))
    expected, state = np.asarray(big["w"]), put(big, structs)
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
    assert sorted(path.name for path in saved.directory.iterdir()) == ["10", "100"]


def test_closed_means_on_disk(tmp_path: Path):
    with checkpoints(tmp_path) as first:
        first.save(3, {"w": jnp.float32(1)})
    with checkpoints(tmp_path) as second:
        assert second.latest() == 3


def test_meta_says_what_the_arrays_are_and_where_the_run_is(saved: Checkpoints):
    before = datetime.now(UTC).replace(microsecond=0)
    saved.save(7, {"step": jnp.int32(7), "w": jnp.zeros((2, 3), jnp.bfloat16)}, {"loss": 2.5})
    saved.wait()
    meta = json.loads((saved.directory / "7" / "meta.json").read_text())
    assert before <= datetime.fromisoformat(meta.pop("saved")) <= datetime.now(UTC)
    assert meta == {
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
import os, sys
from pathlib import Path
import jax.numpy as jnp
from meshpar.checkpoint import checkpoints, checksums

saved = checkpoints.Checkpoints(Path(sys.argv[1]))
saved.save(1, {"w": jnp.float32(1)})
saved.wait()
checksums.write = lambda folder: os._exit(9)  # the arrays of step 2 are on disk, their checksums are not
saved.save(2, {"w": jnp.float32(2)})
saved.wait()
"""


def test_a_save_that_was_killed_is_as_if_it_had_not_been(tmp_path: Path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, timeout=100)
    assert killed.returncode == 9, killed.stderr.decode()
    assert (tmp_path / "2.partial" / "state").is_dir()
    scalar = {"w": jax.ShapeDtypeStruct((), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))}
    with checkpoints(tmp_path) as saved:
        assert saved.latest() == 1
        assert saved.restore(scalar)["w"] == 1
        saved.save(2, {"w": jnp.float32(4)})
        saved.wait()
        assert saved.latest() == 2
        assert saved.restore(scalar)["w"] == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
