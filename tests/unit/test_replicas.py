"""A copy of replicated state that differs is found, its device is named, and the run goes back to before it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.inspection.inspect import inspect
from meshpar.mesh.layout import MeshLayout
from meshpar.train.replicas import checksum, comparison, differences
from tests.damage import with_flipped_bit


def placed(mesh: Any, x: np.ndarray, *spec: str | None) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


@pytest.fixture(scope="module")
def mesh() -> Any:
    return MeshLayout(data=4, fsdp=2).build(jax.devices()[:8])


@pytest.fixture(scope="module")
def state(mesh: Any) -> dict[str, jax.Array]:
    numbers = np.random.default_rng(0)
    return {
        "whole": placed(mesh, numbers.normal(size=(3, 5)).astype("f4")),
        "half": placed(mesh, numbers.normal(size=(8, 2)).astype(jnp.bfloat16), "fsdp"),
        "shards": placed(mesh, numbers.normal(size=(8, 2)).astype("f4"), ("data", "fsdp")),
        "step": placed(mesh, np.int32(7)),
    }


@pytest.mark.parametrize("name", ["whole", "half", "step"])
@pytest.mark.parametrize(("device", "bit"), [(0, 0), (5, 15)])
def test_the_device_with_a_flipped_bit_is_named(state, name, device, bit):
    assert differences(state) == []
    wrong = state | {name: with_flipped_bit(state[name], device, bit)}
    assert differences(wrong) == [f"  device {device} (cpu) of process 0: {name}"]


def test_with_two_copies_both_devices_are_named():
    mesh = MeshLayout(data=2, fsdp=2).build(jax.devices()[:4])
    half = placed(mesh, np.ones((4, 2), "f4"), "fsdp")
    found = differences({"half": with_flipped_bit(half, 1)})
    assert [line.split()[1] for line in found] == ["1", "3"]


def test_control_a_shard_without_a_copy_is_not_compared(state):
    assert differences(state | {"shards": with_flipped_bit(state["shards"], 3)}) == []


def test_one_program_sends_twice_four_bytes_an_array(mesh, state):
    arrays = [state[path] for path in ("whole", "half", "step")]
    compiled = comparison(tuple(x.sharding for x in arrays)).lower(arrays).compile()
    found = inspect(compiled, mesh)
    # All-reduces over 8 devices (two arrays), over the 4 of `data` (one), and of one number over all.
    whole = 2 * (2 * 7 / 8 * 8)
    half = 2 * (2 * 3 / 4 * 4)
    assert sum(found.bytes_per_axis.values()) == whole + half + 2 * 7 / 8 * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "uint8"])
def test_every_bit_counts(dtype):
    x = np.zeros(6, np.uint8 if dtype == "bool" else jnp.dtype(dtype))
    bits = 1 if dtype == "bool" else 8 * x.dtype.itemsize
    sums = {int(checksum(jnp.asarray(x.astype(dtype))))}
    for bit in range(bits):
        flipped = x.copy()
        flipped.view(f"u{x.dtype.itemsize}")[4] ^= np.asarray(1 << bit).astype(f"u{x.dtype.itemsize}")
        sums.add(int(checksum(jnp.asarray(flipped.astype(dtype) if dtype == "bool" else flipped))))
    assert len(sums) == bits + 1
