"""Codes and scales are those of the definition, in NumPy; every other path through them is the same kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from meshpar.errors import ConfigError
from meshpar.models import Llama
from meshpar.nn import quantized_kernel
from meshpar.nn.quantized_kernel import Quantized
from meshpar.tree import flatten_with_paths

LARGEST = {"int8": 127, "int4": 7, "nf4": 1}
SIZES = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "vocab_size": 29}


def normal_quantiles() -> np.ndarray:
    """The levels of nf4, as the paper makes them: quantiles of the normal distribution."""
    end = 1 - (1 / 32 + 1 / 30) / 2  # the mean of the outer halves of 16 and of 15 intervals
    above = norm.ppf(np.linspace(end, 0.5, 9)[:-1])
    below = -norm.ppf(np.linspace(end, 0.5, 8)[:-1])
    levels = np.sort(np.concatenate([above, below, [0.0]]))
    return levels / levels.max()


def by_definition(
    kernel: np.ndarray, dim: int, group: int, kind: str, double: bool = False, num_inputs: int = 1
) -> np.ndarray:
    """The kernel that codes stand for, one group after the other."""
    levels = np.array(quantized_kernel.NF4) if kind == "nf4" else np.arange(-LARGEST[kind], LARGEST[kind] + 1)
    moved = np.moveaxis(kernel, dim, 0)
    starts = range(0, len(moved), group)
    scales = np.stack([np.abs(moved[start : start + group]).max(0) / levels.max() for start in starts])
    if double:
        inputs = (0, *range(dim - num_inputs + 2, dim + 1))  # the groups, and then the other input dims
        mean = scales.mean(inputs, keepdims=True)
        step = np.abs(scales - mean).max(inputs, keepdims=True) / 127
        scales = np.rint((scales - mean) / np.where(step == 0, 1, step)) * step + mean
    found = np.zeros_like(moved)
    for start, scale in zip(starts, scales, strict=True):
        steps = moved[start : start + group] / np.where(scale == 0, 1, scale)
        nearest = np.abs(steps[..., None] - levels).argmin(-1)
        found[start : start + group] = levels[nearest] * scale
    return np.moveaxis(found, 0, dim)


@pytest.mark.parametrize("kind", LARGEST)
@pytest.mark.parametrize(("shape", "dim", "group"), [((2, 16, 6), 1, 4), ((2, 4, 8, 3), 2, 64), ((8, 2), 0, 2)])
def test_a_kernel_is_that_of_the_definition(kind, shape, dim, group, float64):
    kernel = np.random.default_rng(0).normal(size=shape)
    kernel.reshape(-1)[: kernel.size // 4] = 0  # whole groups of zeros too
    how = Quantized(kind=kind, group=group)
    stored = how.quantize(jnp.asarray(kernel), dim)
    want = by_definition(kernel, dim, min(group, shape[dim]), kind)
    assert abs(np.asarray(how.dequantize(stored, dim)) - want).max() < 1e-15
    assert stored["codes"].nbytes == kernel.size // (1 if kind == "int8" else 2)
    assert stored["scales"].size == kernel.size // min(group, shape[dim])


@pytest.mark.parametrize(("shape", "dim", "num_inputs"), [((2, 32, 6), 1, 1), ((2, 4, 8, 3), 2, 2)])
def test_double_quantization_stores_scales_as_codes_of_each_output(shape, dim, num_inputs, float64):
    kernel = np.random.default_rng(1).normal(size=shape)
    how = Quantized(kind="nf4", group=4, double=True)
    stored = how.quantize(jnp.asarray(kernel), dim, num_inputs)
    want = by_definition(kernel, dim, 4, "nf4", double=True, num_inputs=num_inputs)
    assert abs(np.asarray(how.dequantize(stored, dim, num_inputs)) - want).max() < 1e-15
    assert stored["scales"].dtype == jnp.int8
    num_outputs = kernel.size // np.prod(shape[dim - num_inputs + 1 : dim + 1])
    assert sum(x.nbytes for x in stored.values()) == kernel.size // 2 + kernel.size // 4 + 2 * 8 * num_outputs


def test_the_levels_are_those_of_the_paper():
    """The reference implementation computed its table in float32."""
    assert abs(np.array(quantized_kernel.NF4) - normal_quantiles()).max() < 1e-6


def test_rounded_scales_are_those_that_codes_are_divided_by():
    kernel = jnp.asarray(np.random.default_rng(0).normal(size=(64, 8)), jnp.bfloat16)
    how = Quantized(kind="int8")
    stored = how.quantize(kernel, 0)
    codes, scales = stored["codes"], stored["scales"]
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
    got = how.dequantize(how.quantize(jnp.asarray(kernel), 0), 0)
    assert abs(np.asarray(got) - by_definition(kernel, 0, 8, "int4")).max() > 0.1


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
