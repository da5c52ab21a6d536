"""The error of products in 8 bits is within the bound of rounding, and near it; a model trains with them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from jax import lax

from meshpar import fit
from meshpar.experiment.config import load
from meshpar.parallel import quantized
from meshpar.parallel.quantized import Shards, matmuls
from tests.rounding import unscaled

ROOT = Path(__file__).parents[2]
B, S, K, N = 2, 16, 64, 24


class Rounding(NamedTuple):
    """An element is wrong by at most `relative` times itself, plus `absolute` times the largest of its row."""

    relative: float
    absolute: float


# Half of the last bit: 3 and 2 bits of mantissa; below the smallest normal number, half of the smallest number.
E4M3 = Rounding(2**-4, 2**-10 / 448)
E5M2 = Rounding(2**-3, 2**-17 / 57344)
INT8 = Rounding(0.0, 0.5 / 127)
ROUNDINGS = {"fp8": (E4M3, E5M2), "int8": (INT8, INT8)}


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, w and dy, whose rows and columns have sizes of many magnitudes."""
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-4, 4, (B, S, 1))
    x = rng.standard_normal((B, S, K)) * sizes
    w = rng.standard_normal((K, N)) * 10.0 ** rng.uniform(-4, 0, N)
    return x, w, rng.standard_normal((B, S, N)) / sizes


def products(number_format: str) -> list[np.ndarray]:
    """y, dx and dw of the 8-bit product, in float32."""
    x, w, dy = (jnp.asarray(array, jnp.float32) for array in arrays())
    y, backward = jax.vjp(lambda x, w: matmuls(x, [w], number_format, Shards())[0], x, w)  # pyright: ignore
    return [np.asarray(array, np.float64) for array in (y, *backward(dy))]


def errors(array: np.ndarray, dims: tuple[int, ...], rounding: Rounding) -> np.ndarray:
    """The bound on the rounding error of each element, where these dims share a scale."""
    size = np.abs(array)
    return rounding.relative * size + rounding.absolute * size.max(dims, keepdims=True)


def bounds(number_format: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """The exact product, and the bound on its error: |a| e_b + e_a (|b| + e_b), summed. For y, dx and dw."""
    x, w, dy = arrays()
    of_operand, of_gradient = ROUNDINGS[number_format]
    e_x = errors(x, (2,), of_operand)
    e_w = errors(w, (0,), of_operand)
    # dy is rounded after it was multiplied by the scales of w, or of x, which divide w, or x.
    scale_w = np.abs(w).max(0)
    scale_x = np.abs(x).max(2, keepdims=True)
    e_for_x = errors(dy * scale_w, (2,), of_gradient) / scale_w
    e_for_w = errors(dy * scale_x, (0, 1), of_gradient) / scale_x

    def bound(equation: str, a: np.ndarray, e_a: np.ndarray, b: np.ndarray, e_b: np.ndarray) -> tuple:
        error = np.einsum(equation, np.abs(a), e_b) + np.einsum(equation, e_a, np.abs(b) + e_b)
        return np.einsum(equation, a, b), error

    return [
        bound("bsk,kn->bsn", x, e_x, w, e_w),
        bound("bsn,kn->bsk", dy, e_for_x, w, e_w),
        bound("bsk,bsn->kn", x, e_x, dy, e_for_w),
    ]


def worst(number_format: str) -> list[float]:
    """The largest error of y, dx and dw, over its bound."""
    found = products(number_format)
    limits = bounds(number_format)
    return [float((np.abs(got - exact) / limit).max()) for got, (exact, limit) in zip(found, limits, strict=True)]


@pytest.mark.parametrize("number_format", ["fp8", "int8"])
def test_errors_are_within_the_bound_of_rounding_and_not_far_below(number_format):
    """Errors of 64 terms cancel, so the worst element is at about a third of the bound."""
    assert all(0.1 < error < 1 for error in worst(number_format)), worst(number_format)


@pytest.mark.parametrize(("dtype", "end"), [(jnp.int8, 127.5 / 127), (jnp.float8_e4m3fn, 1), (jnp.float8_e5m2, 1)])
def test_the_codec_rounds_as_qwix_does(dtype, end):
    """To the bit, with the range of int8 for which the largest element becomes 127."""
    x = jax.random.normal(jax.random.key(0), (64, 33)) * jnp.exp(jax.random.normal(jax.random.key(1), (64, 33)))
    top = quantized.largest(x, (1,), ())
    within_one = qwix.quantize(x / top, dtype, calibration_method=f"fixed,{end}")
    got = quantized._quantize(x, dtype, top)
    np.testing.assert_array_equal(got.qvalue.astype(jnp.float32), within_one.qvalue.astype(jnp.float32))
    np.testing.assert_array_equal(got.scale, within_one.scale * top)


@pytest.mark.parametrize("number_format", ["fp8", "int8"])
def test_control_without_scales_errors_exceed_the_bound(number_format, monkeypatch):
    monkeypatch.setattr(quantized, "_quantize", unscaled(quantized._quantize))
    y, _, dw = worst(number_format)  # the range of e5m2 is enough for dx
    assert y > 2 and dw > 2


@pytest.mark.parametrize("number_format", ["fp8", "int8"])
def test_a_row_does_not_depend_on_the_others(number_format):
    """So neither batch nor cache changes what is generated."""
    x, w, _ = (jnp.asarray(array, jnp.float32) for array in arrays())
    (whole,) = matmuls(x, [w], number_format, Shards())
    (alone,) = matmuls(x[1:, 3:4], [w], number_format, Shards())
    np.testing.assert_array_equal(whole[1:, 3:4], alone)


@pytest.mark.parametrize("number_format", ["fp8", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(number_format, bad):
    """A step is skipped when its loss is not finite: rounding must not hide that."""
    x, w, _ = (jnp.asarray(array, jnp.float32) for array in arrays())
    (y,) = matmuls(x.at[0, 0, 0].set(bad), [w], number_format, Shards())
    assert not np.isfinite(y[0, 0]).any()
    assert np.isfinite(y[1]).all()


def checkpointed() -> list[np.ndarray]:
    """y, dx and dw in fp8, under a `jax.checkpoint` that saves everything."""
    x, w, dy = (jnp.asarray(array, jnp.float32) for array in arrays())

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable)
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return matmuls(x, [w], "fp8", Shards())[0]

    y, backward = jax.vjp(product, x, w)
    return [np.asarray(array, np.float64) for array in (y, *backward(dy))]


def test_checkpoint_saves_what_was_rounded():
    for got, want in zip(checkpointed(), products("fp8"), strict=True):
        np.testing.assert_array_equal(got, want)


def test_control_checkpoint_turns_large_floats_into_nan(monkeypatch):
    """The planted fault: inputs are saved as float8_e4m3fn, not as integers."""
    monkeypatch.setattr(lax, "bitcast_convert_type", lambda x, _: x)
    assert np.isnan(checkpointed()[0]).any()


def last_losses(folder: Path, num_steps: int, *overrides: str) -> float:
    """The mean loss of the records in the last fifth of a quickstart."""
    shared = ["loggers=[]", f"num_steps={num_steps}", f"run_dir={folder}"]
    fit(load(ROOT / "configs/quickstart.yaml", [*shared, *overrides]))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "train" and record["step"] > 0.8 * num_steps]
    return sum(losses) / len(losses)


@pytest.fixture(scope="module")
def plain_loss(tmp_path_factory):
    """After 300 steps in float32."""
    return last_losses(tmp_path_factory.mktemp("plain"), 300)


@pytest.mark.slow
@pytest.mark.parametrize("number_format", ["fp8", "int8"])
def test_the_quickstart_trains_as_well(number_format, plain_loss, tmp_path):
    scaled = last_losses(tmp_path, 300, f"precision.matmul={number_format}")
    assert abs(scaled / plain_loss - 1) < 0.005


@pytest.mark.slow
def test_control_without_scales_the_quickstart_trains_worse(plain_loss, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized, "_quantize", unscaled(quantized._quantize))
    assert last_losses(tmp_path, 300, "precision.matmul=int8") / plain_loss - 1 > 0.05
