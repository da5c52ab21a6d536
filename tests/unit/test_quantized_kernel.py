"""Codes and scales are those of the definition, in NumPy; every other path through them is the same kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.errors import ConfigError
from meshpar.models import Llama
from meshpar.nn import quantized_kernel
from meshpar.nn.quantized_kernel import Quantized
from meshpar.tree import flatten_with_paths

LARGEST = {"int8": 127, "int4": 7}
SIZES = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "vocab_size": 29}


def by_definition(kernel: np.ndarray, dim: int, group: int, largest: int) -> np.ndarray:
    """The kernel that codes stand for, one group after the other."""
    moved = np.moveaxis(kernel, dim, 0)
    found = np.zeros_like(moved)
    for start in range(0, len(moved), group):
        part = moved[start : start + group]
        scale = np.abs(part).max(0) / largest
        steps = np.divide(part, scale, out=np.zeros_like(part), where=scale != 0)
        found[start : start + group] = np.clip(np.rint(steps), -largest, largest) * scale
    return np.moveaxis(found, 0, dim)


@pytest.mark.parametrize("kind", LARGEST)
@pytest.mark.parametrize(("shape", "dim", "group"), [((2, 16, 6), 1, 4), ((2, 4, 8, 3), 2, 64), ((8, 2), 0, 2)])
def test_a_kernel_is_that_of_the_definition(kind, shape, dim, group, float64):
    kernel = np.random.default_rng(0).normal(size=shape)
    kernel.reshape(-1)[: kernel.size // 4] = 0  # whole groups of zeros too
    how = Quantized(kind=kind, group=group)
    codes, scales = how.quantize(jnp.asarray(kernel), dim)
    want = by_definition(kernel, dim, group, LARGEST[kind])
    assert abs(np.asarray(how.dequantize(codes, scales, dim)) - want).max() < 1e-15
    assert codes.nbytes == kernel.size // (2 if kind == "int4" else 1)
    assert scales.size == kernel.size // min(group, shape[dim])


def test_rounded_scales_are_those_that_codes_are_divided_by():
    kernel = jnp.asarray(np.random.default_rng(0).normal(size=(64, 8)), jnp.bfloat16)
    how = Quantized(kind="int8")
    codes, scales = how.quantize(kernel, 0)
    assert scales.dtype == jnp.bfloat16
    restored = np.asarray(codes, np.float64) * np.asarray(scales, np.float64)
    error = abs(restored - np.asarray(kernel, np.float64)) / np.asarray(scales, np.float64)
    # The largest of a column is clipped if its scale was rounded down.
    assert (error < 0.501).sum() >= kernel.size - 8
    assert error.max() < 1


def test_planted_nibbles_in_the_other_order_are_seen(monkeypatch):
    kernel = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    how = Quantized(kind="int4")
    unpacked = quantized_kernel._unpacked
    monkeypatch.setattr(quantized_kernel, "_unpacked", lambda x, dim: unpacked((x >> 4) | (x << 4), dim))
    got = how.dequantize(*how.quantize(jnp.asarray(kernel), 0), 0)
    assert abs(np.asarray(got) - by_definition(kernel, 0, 8, 7)).max() > 0.1


def test_all_kernels_that_cannot_be_divided_are_listed():
    with pytest.raises(ConfigError) as refused:
        Llama(**SIZES, weights={"kind": "int4", "group": 16}).array_specs()
    assert str(refused.value).count("cannot be divided into groups of 16") == 1  # down, with 24 inputs
    assert "model.weights: blocks.mlp.down" in str(refused.value)
    assert "group=12" in str(refused.value)
    with pytest.raises(ConfigError, match="experts"):
        Llama(**SIZES, weights="int8", experts={"num": 2, "per_token": 1, "intermediate_size": 8}).array_specs()
    with pytest.raises(ConfigError, match="did you mean"):
        Llama(**SIZES, low_rank=[{"path": "blocks.mlp.ups", "rank": 2}]).array_specs()


def test_a_device_stores_bytes_for_codes():
    specs = flatten_with_paths(Llama(**SIZES, weights={"kind": "int4", "group": 8}).array_specs())
    up = {path: spec for path, spec in specs.items() if path.startswith("blocks.mlp.up")}
    assert {path: (spec.shape, jax.dtypes.canonicalize_dtype(spec.dtype).name) for path, spec in up.items()} == {
        "blocks.mlp.up.kernel.codes": ((2, 8, 24), "uint8"),
        "blocks.mlp.up.kernel.scales": ((2, 2, 24), "float32"),
    }
