"""Compressed weights and cache: bytes, logits by definition, and the same tokens on every mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshpar.nn import compressed
from meshpar.nn.attention.codes import Codes
from meshpar.nn.attention.paged import PagedCache
from meshpar.nn.attention.reference import Reference
from meshpar.tree import flatten_with_paths
from tests.serving import MODELS, SIZES, cached_logits, full_logits, generated, paged, params

ROWS = np.random.default_rng(0).integers(0, 29, (4, 14))


@pytest.fixture(autouse=True)
def _float64(float64):
    """Every test of this module computes in float64."""


def test_a_compressed_model_computes_what_its_dense_kernels_do():
    model = MODELS["llama_compressed"]
    plain = model.model_copy(update={"weights": None, "low_rank": ()})
    abstract = nnx.eval_shape(lambda: model.build(nnx.Rngs(0)))
    dense = compressed.dense(abstract, flatten_with_paths(jax.tree.map(jnp.asarray, params("llama_compressed"))))
    nested = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: plain.build(nnx.Rngs(0))), nnx.Param))
    assert {*flatten_with_paths(nested)} == {*dense}
    want = _forward(plain, dense)
    assert abs(full_logits("llama_compressed", ROWS[0]) - want).max() < 1e-10
    planted = dense | {"blocks.mlp.up.kernel": dense["blocks.mlp.gate.kernel"]}
    assert abs(_forward(plain, planted) - want).max() > 1e-2


def _forward(model, arrays) -> np.ndarray:
    from meshpar.export.forward import forward_of

    return np.asarray(jax.jit(forward_of(model, "float64"))(arrays, jnp.asarray(ROWS[:1], jnp.int32))[0])


def test_factors_have_the_smallest_rank_that_keeps_the_error():
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(2, 16, 4)) @ rng.normal(size=(2, 4, 32)) + 0.1 * rng.normal(size=(2, 16, 32))
    for error in (0.5, 0.1, 0.03):
        found = compressed._factors(kernel, 1, 2, error)
        errors = [relative(kernel, found.first @ found.second)]
        u, s, vt = np.linalg.svd(kernel, full_matrices=False)
        less = found.rank - 1
        errors.append(relative(kernel, (u[..., :less] * s[:, None, :less]) @ vt[:, :less]))
        assert errors[0] <= error < errors[1]
        assert abs(found.error - errors[0]) < 1e-12


def relative(kernel: np.ndarray, product: np.ndarray) -> float:
    """The largest relative error of a layer in the Frobenius norm."""
    return float((np.linalg.norm(kernel - product, axis=(1, 2)) / np.linalg.norm(kernel, axis=(1, 2))).max())


def attended(keys: np.ndarray, values: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Attention of one query [heads, head_dim] to keys [tokens, heads, head_dim], in NumPy."""
    scores = np.einsum("hd,thd->ht", q, keys) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(-1, keepdims=True), values)


def rounded(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max(-1, keepdims=True) / 127
    return np.clip(np.rint(x / scale), -127, 127) * scale


def empty() -> PagedCache:
    """An 8-bit cache with room for six tokens of one row in one layer."""
    slots = (1, 1, 4, 2)
    both = (Codes(jnp.zeros((*slots, 2, 8), jnp.int8), jnp.zeros((*slots, 2))),) * 2
    return PagedCache(*both, jnp.array([[2, 3, 1]], jnp.int32))


def one_token() -> tuple[np.ndarray, np.ndarray]:
    """The core's result for a fifth token with an 8-bit cache, and that of the definition."""
    rng = np.random.default_rng(0)
    k, v, q = rng.normal(size=(3, 1, 5, 2, 8))
    cache = empty()
    for begin, end in ((0, 4), (4, 5)):
        positions = jnp.arange(begin, end, dtype=jnp.int32)[None]
        new = [jnp.asarray(x[:, begin:end]) for x in (q, k, v)]
        out, cache = cache.layer(jnp.int32(0), Reference()).with_tokens(*new, positions, None)
    return np.asarray(out)[0, 0], attended(rounded(k[0]), rounded(v[0]), q[0, 4])


def test_an_int8_cache_attends_to_the_rounded_keys_and_values():
    got, want = one_token()
    assert abs(got - want).max() < 1e-12


def test_planted_scales_of_the_next_head_are_seen(monkeypatch):
    encode = Codes.of

    def rolled(x):
        right = encode(x)
        return right._replace(scales=jnp.roll(right.scales, 1, axis=-1))

    monkeypatch.setattr(Codes, "of", rolled)
    got, want = one_token()
    assert abs(got - want).max() > 1e-3


def test_the_bytes_of_int8_pages():
    """A byte for each element, and a scale in the dtype of the computation for each token and head."""
    floats, int8 = (paged("llama", "tensor4", "manual", cache_format=how).page_bytes for how in (None, "int8"))
    page = 2 * 4 * SIZES["num_layers"] * SIZES["num_heads"] // 4
    assert (floats, int8) == (page * 4 * 8, page * (4 + 8))


def test_tokens_with_an_int8_cache_do_not_depend_on_the_mesh():
    want = generated("llama", "one", "auto", cache_format="int8")
    assert (generated("llama", "tensor4", "manual", cache_format="int8") == want).all()


def test_compressed_logits_equal_those_of_one_device():
    want = cached_logits("llama_compressed", "one", "auto", ROWS)
    assert abs(cached_logits("llama_compressed", "data2_fsdp2_tensor2", "manual", ROWS) - want).max() < 1e-10
