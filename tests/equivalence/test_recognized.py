"""Attention of a user's model, in four ways of writing it and by `attend`, over rows that devices share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshpar import AxisRules, MeshLayout, training
from meshpar.cost.flops import flops, needed_flops, traced_products
from meshpar.errors import ConfigError
from meshpar.nn.attention.functional import attend, local_attention
from meshpar.nn.recognized import band, rewritten
from meshpar.nn.recognized.band import Band
from meshpar.parallel.context import ParallelContext, tracing
from meshpar.parallel.strategies import ContextParallel, Parallel
from meshpar.verification.trial import Trial
from tests.comparison import largest_difference

SEQ, WIDTH, HEADS, VOCAB = 32, 32, 4, 16


def by_hand(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    scores += jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), 0.0, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def of_jax(q, k, v):
    return jax.nn.dot_product_attention(q, k[:, :, ::2], v[:, :, ::2], is_causal=True, local_window_size=(9, 0))


def of_linen(q, k, v):
    return nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(jnp.ones((q.shape[0], SEQ))))


def of_nnx(q, k, v):
    return nnx.dot_product_attention(q, k, v)


def in_float64(q, k, v, window=None):
    """What `jax.nn.dot_product_attention`, which rounds the scores to float32, computes without rounding."""
    distance = np.arange(SEQ)[:, None] - np.arange(SEQ)
    visible = (distance >= 0) & (distance < window) if window else np.full(distance.shape, fill_value=True)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)), v)


def of_jax_in_float64(q, k, v):
    shared = (jnp.repeat(x[:, :, ::2], 2, axis=2) for x in (k, v))
    return in_float64(q, *shared, window=10)


WRITTEN = {way.__name__: way for way in (by_hand, of_jax, of_linen, of_nnx)}
WAYS = WRITTEN | {"attend": attend}
REFERENCE = WAYS | {"of_jax": of_jax_in_float64, "of_nnx": in_float64, "attend": by_hand}
CONTEXTS = {
    "ring2": (2, {"kind": "ring"}),
    "ring4": (4, {"kind": "ring"}),
    "gather4": (4, {"kind": "all_gather"}),
    "ulysses2": (2, {"kind": "ulysses"}),
    "hybrid4": (4, {"kind": "hybrid", "group": 2}),
}
SAMPLE = {("by_hand", "ring4"), ("of_jax", "gather4"), ("attend", "ring2")}
"""`test_recognized_masks` has one of each other layout."""


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


class Model(nn.Module):
    attention: Callable[..., jax.Array]

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, param_dtype=jnp.float64)(tokens)
        q, k, v = (nn.DenseGeneral((HEADS, WIDTH // HEADS), param_dtype=jnp.float64)(x) for _ in range(3))
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), param_dtype=jnp.float64)(self.attention(q, k, v))
        return nn.Dense(VOCAB, param_dtype=jnp.float64)(x)


@lru_cache
def batch():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (8, SEQ + 1), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def loss_of(attention):
    def loss(params, batch, key):
        logits = Model(attention).apply({"params": params}, batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    return loss


def init_of(way):
    return lambda key: Model(WAYS[way]).init(key, jnp.zeros((1, SEQ), jnp.int32))["params"]


def made(way, mesh, context=None, **changes):
    mesh = MeshLayout(**mesh)
    parallel = Parallel(context=ContextParallel(**context)) if context else Parallel()
    return training(
        init_of(way), changes.pop("loss", loss_of(WAYS[way])), optax.sgd(0.1), batch(),
        mesh=mesh.build(jax.devices()[: mesh.requested()]), rules=AxisRules(preset=["context"], unnamed=()),
        batch_dims=dict.fromkeys(batch(), ("batch", "seq")), parallel=parallel,
        compute_dtype=np.dtype("float64"), **changes,
    )  # fmt: skip


def on_one_device(way):
    params = init_of(way)(jax.random.key(0))
    given = {name: jnp.array(x) for name, x in batch().items()}
    return params, jax.jit(jax.value_and_grad(loss_of(REFERENCE[way])))(params, given, None)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("way", "context"),
    [
        pytest.param(way, context, marks=() if (way, context) in SAMPLE else pytest.mark.slow)
        for way in WAYS
        for context in CONTEXTS
    ],
)
def test_rows_that_devices_share_have_the_gradients_of_one_device(way, context):
    size, declared = CONTEXTS[context]
    made_ = made(way, {"data": 2, "context": size}, declared)
    params, (loss, grads) = on_one_device(way)
    trial = Trial(made_)
    state = made_.compile_init()()
    placed = jax.tree.map(lambda x, like: jax.device_put(jnp.array(x), like.sharding), params, state.params)
    _, metrics, found = trial._step(replace(state, params=placed), made_.put(batch()))
    assert abs(metrics["loss"] - loss) <= 1e-10
    assert largest_difference(jax.device_get(found), jax.device_get(grads)) <= 1e-10


@pytest.mark.parametrize("way", WRITTEN)
def test_attention_is_found_in_each_way_of_writing_it(way):
    (found,) = made(way, {"data": 2}).attention
    assert str(found.band) == {"of_jax": "a window of 10 earlier tokens", "of_nnx": "all tokens"}.get(
        way, "earlier tokens"
    )
    assert "test_recognized.py" in str(found) and "attention of 32 tokens" in str(found)


def test_a_zigzag_ring_computes_the_scores_that_causal_attention_needs():
    x = jax.ShapeDtypeStruct((1, 4096, 2, 8), jnp.float32)
    mesh = MeshLayout(context=4).abstract()
    ctx = ParallelContext(
        mesh=mesh, rules=AxisRules(preset=["context"]), manual=True, activation_dims=(),
        parallel=Parallel(context=ContextParallel(kind="ring")),
    )  # fmt: skip

    def on_shards(q, k, v):
        with tracing(ctx):
            return local_attention(q, k, v, causal=True, window=None, segments=None, scale=None, axes=("context",))

    spec = jax.P(None, "context")
    program = jax.make_jaxpr(jax.shard_map(on_shards, mesh=mesh, in_specs=spec, out_specs=spec))(x, x, x)
    products = traced_products(program)
    needed = flops(traced_products(jax.make_jaxpr(by_hand)(x, x, x)))["dot_general"] / 2
    assert needed_flops(products) == needed
    assert 1 < sum(one.total for one in products) / needed <= 1.02


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        (lambda n: jnp.tril(jnp.ones((n, n), bool), 1), "neither causal nor a window"),
        (lambda n: jnp.tril(jnp.ones((n, n), bool)).at[3, 1].set(False), "neither causal nor a window"),
        (lambda n: jnp.arange(n) != 2, "hides the same keys"),
    ],
)
def test_a_mask_that_no_core_computes_is_left_as_it_is_written(mask, why):
    def attention(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask(8), scores, -jnp.inf)), v)

    closed = jax.make_jaxpr(attention)(*[jnp.ones((1, 8, 2, 4))] * 3)
    same, (found,) = rewritten(closed)
    assert same is closed
    assert found.band is None and why in str(found)


@pytest.mark.parametrize(
    "changed",
    [
        lambda scores, mask, v: jnp.einsum(
            "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, jnp.sin(scores), -jnp.inf)), v
        ),
        lambda scores, mask, v: jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, 0.0)), v),
        lambda scores, mask, v: jnp.einsum(
            "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=2), v
        ),
        lambda scores, mask, v: jnp.einsum("bhqk,bqhd->bkhd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), v),
        lambda scores, mask, v: jnp.einsum("bhqk,bkhd->bqhd", 2 * jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), v),
    ],
    ids=["sine", "a mask of zeros", "softmax over queries", "values of queries", "twice"],
)
def test_what_is_almost_attention_is_left_as_it_is_written(changed):
    def attention(q, k, v):
        return changed(jnp.einsum("bqhd,bkhd->bhqk", q, k), jnp.tril(jnp.ones((8, 8), bool)), v)

    closed = jax.make_jaxpr(attention)(*[jnp.ones((1, 8, 2, 4))] * 3)
    assert not any(one.band for one in rewritten(closed)[1])


@pytest.mark.parametrize("stopped", ["scores", "weights"])
def test_a_stopped_gradient_is_left_as_it_is_written(stopped):
    """The scores have no gradient there, and attention's would have one."""
    stop = {stopped: jax.lax.stop_gradient}

    def attention(q, k, v):
        scores = stop.get("scores", jnp.copy)(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", stop.get("weights", jnp.copy)(jax.nn.softmax(scores)), v)

    closed = jax.make_jaxpr(attention)(*[jnp.ones((1, 8, 2, 4))] * 3)
    assert not any(one.band for one in rewritten(closed)[1])


def test_context_without_attention_is_refused_with_the_reason():
    def loss(params, batch, key):
        logits = jnp.take(params["w"], batch["tokens"], axis=0)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    with pytest.raises(ConfigError, match=r"parallel\.context has no effect: meshpar recognizes no attention"):
        training(
            lambda key: {"w": jnp.ones((VOCAB, VOCAB))}, loss, optax.sgd(0.1), batch(), mesh=MeshLayout(context=8),
            rules=AxisRules(preset=["context"], unnamed=()), batch_dims=dict.fromkeys(batch(), ("batch", "seq")),
            parallel=Parallel(context=ContextParallel(kind="ring")),
        )  # fmt: skip


def test_planted_a_mask_that_nobody_notices_is_found(monkeypatch):
    monkeypatch.setattr(band, "band", lambda masks, queries, key: (Band(is_causal=False), queries[-1]))
    params, (loss, _) = on_one_device("by_hand")
    made_ = made("by_hand", {"data": 2})
    state = made_.compile_init()()
    placed = jax.tree.map(lambda x, like: jax.device_put(jnp.array(x), like.sharding), params, state.params)
    _, metrics, _ = Trial(made_)._step(replace(state, params=placed), made_.put(batch()))
    assert abs(metrics["loss"] - loss) > 1e-6
