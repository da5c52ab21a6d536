"""Attention with masks of the data, across two rows and with capped scores, in three models and four ways of writing.

The models never heard of meshpar. Each computes what it computes on one device, in five layouts of shared rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshpar import AxisRules, MeshLayout, attention, training
from meshpar.errors import ConfigError
from meshpar.nn.attention.core import Documents
from meshpar.nn.recognized import operation, rewritten
from meshpar.parallel.strategies import ContextParallel, Parallel
from meshpar.verification.trial import Trial
from tests.comparison import largest_difference
from tests.equivalence.test_recognized import CONTEXTS

ROWS, SEQ, SOURCE, WIDTH, HEADS, VOCAB = 8, 32, 48, 16, 4, 16
HALF = {"param_dtype": jnp.float64}


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


# Ways of writing attention whose padding is hidden: (q, k, v, which keys are tokens, whether it is causal) -> result.


def by_hand(q, k, v, valid, causal):
    """In the style of T5: numbers that are added."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    scores += jnp.where(valid[:, None, None, :] > 0, 0.0, -1e10)
    if causal:
        scores += jnp.triu(jnp.full(scores.shape[-2:], -1e10), 1)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def of_jax(q, k, v, valid, causal):
    return jax.nn.dot_product_attention(q, k, v, mask=valid[:, None, None, :], is_causal=causal)


def of_jax_in_float64(q, k, v, valid, causal):
    """The same without rounding the scores to float32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    visible = valid[:, None, None, :] & (jnp.tril(jnp.ones(scores.shape[-2:], bool)) if causal else True)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)), v)


def of_linen(q, k, v, valid, causal):
    """Queries that are padding see nothing, if they are of the same row: they get the mean of all values."""
    queries = valid if q.shape[1] == k.shape[1] else jnp.ones(q.shape[:2])
    mask = nn.make_attention_mask(queries, valid)
    return nn.dot_product_attention(
        q, k, v, mask=nn.combine_masks(mask, nn.make_causal_mask(queries)) if causal else mask
    )


def of_nnx(q, k, v, valid, causal):
    """Padding is a document of its own; scores are capped, as in Gemma 2, which Flax's function cannot do."""
    documents = valid.astype(jnp.int32)
    queries = documents if q.shape[1] == k.shape[1] else jnp.ones(q.shape[:2], jnp.int32)
    mask = nnx.make_attention_mask(queries, documents, jnp.equal)
    mask = nnx.combine_masks(mask, nnx.make_causal_mask(queries)) if causal else mask
    scores = jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 3) * 2
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -1e30)), v)


WAYS = {way.__name__: way for way in (by_hand, of_jax, of_linen, of_nnx)}
REFERENCE = WAYS | {"of_jax": of_jax_in_float64}


class Block(nn.Module):
    way: str
    causal: bool = False
    is_reference: bool = False

    @nn.compact
    def __call__(self, x, memory, valid):
        q, k, v = (nn.DenseGeneral((HEADS, WIDTH // HEADS), **HALF)(y) for y in (x, memory, memory))
        way = (REFERENCE if self.is_reference else WAYS)[self.way]
        return x + nn.DenseGeneral(WIDTH, axis=(-2, -1), **HALF)(way(q, k, v, valid, self.causal))


class Decoder(nn.Module):
    """Rows of other lengths, as a decoder is fine-tuned on."""

    way: str
    is_reference: bool = False

    @nn.compact
    def __call__(self, batch):
        x = nn.Embed(VOCAB, WIDTH, **HALF)(batch["tokens"])
        x = Block(self.way, True, self.is_reference)(x, x, batch["tokens"] > 0)
        return nn.Dense(VOCAB, **HALF)(x)


class Encoder(nn.Module):
    """Like BERT: two layers, so that what padding computes would be seen in the second."""

    way: str
    is_reference: bool = False

    @nn.compact
    def __call__(self, batch):
        x = nn.Embed(VOCAB, WIDTH, **HALF)(batch["tokens"])
        for _ in range(2):
            x = nn.remat(Block)(self.way, False, self.is_reference)(x, x, batch["tokens"] > 0)
        return nn.Dense(VOCAB, **HALF)(x)


class Translator(nn.Module):
    """Like T5: an encoder with padding, and a decoder that attends to it across."""

    way: str
    is_reference: bool = False

    @nn.compact
    def __call__(self, batch):
        embed = nn.Embed(VOCAB, WIDTH, **HALF)
        valid = batch["source"] > 0
        memory = embed(batch["source"])
        memory = Block(self.way, False, self.is_reference)(memory, memory, valid)
        x = embed(batch["tokens"])
        x = Block(self.way, True, self.is_reference)(x, x, batch["tokens"] > 0)
        x = Block(self.way, False, self.is_reference)(x, memory, valid)
        return nn.Dense(VOCAB, **HALF)(x)


MODELS = {model.__name__: model for model in (Decoder, Encoder, Translator)}
CASES = [(model, way, context) for model in MODELS for way in WAYS for context in CONTEXTS]
SAMPLE = {
    ("Decoder", "by_hand", "ring4"),
    ("Encoder", "of_linen", "hybrid4"),
    ("Translator", "of_jax", "ulysses2"),
    ("Translator", "of_nnx", "gather4"),
}


def padded(rng, seq_len):
    """Tokens, of which the last of each row are 0."""
    tokens = rng.integers(1, VOCAB, (ROWS, seq_len), dtype=np.int32)
    tokens[np.arange(seq_len) >= rng.integers(seq_len // 4, seq_len + 1, ROWS)[:, None]] = 0
    return tokens


@lru_cache
def batch(model):
    rng = np.random.default_rng(0)
    arrays = {"tokens": padded(rng, SEQ), "targets": rng.integers(0, VOCAB, (ROWS, SEQ), dtype=np.int32)}
    return arrays | ({"source": padded(rng, SOURCE)} if model == "Translator" else {})


def loss_of(model, way, is_reference=False):
    """The mean over all tokens, also over padding: so a wrong result of a padded query is seen too."""

    def loss(params, batch, key):
        logits = MODELS[model](way, is_reference).apply({"params": params}, batch)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    return loss


def init_of(model, way):
    return lambda key: MODELS[model](way).init(key, {name: x[:1] for name, x in batch(model).items()})["params"]


def made(model, way, mesh, context=None):
    mesh = MeshLayout(**mesh)
    return training(
        init_of(model, way), loss_of(model, way), optax.sgd(0.1), batch(model),
        mesh=mesh.build(jax.devices()[: mesh.requested()]), rules=AxisRules(preset=["context"], unnamed=()),
        batch_dims=dict.fromkeys(batch(model), ("batch", "seq")),
        parallel=Parallel(context=ContextParallel(**context)) if context else Parallel(),
        compute_dtype=np.dtype("float64"),
    )  # fmt: skip


@lru_cache
def on_one_device(model, way):
    params = init_of(model, way)(jax.random.key(0))
    given = {name: jnp.array(x) for name, x in batch(model).items()}
    return params, jax.jit(jax.value_and_grad(loss_of(model, way, is_reference=True)))(params, given, None)


def differences(model, way, mesh, context=None):
    """Of the loss, and the largest of the gradients, from those of one device."""
    made_ = made(model, way, mesh, context)
    params, (loss, grads) = on_one_device(model, way)
    state = made_.compile_init()()
    placed = jax.tree.map(lambda x, like: jax.device_put(jnp.array(x), like.sharding), params, state.params)
    _, metrics, found = Trial(made_)._step(replace(state, params=placed), made_.put(batch(model)))
    return abs(metrics["loss"] - loss), largest_difference(jax.device_get(found), jax.device_get(grads))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "way", "context"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow) for case in CASES],
)
def test_rows_that_devices_share_have_the_gradients_of_one_device(model, way, context):
    size, declared = CONTEXTS[context]
    assert max(differences(model, way, {"data": 2, "context": size}, declared)) <= 1e-10


class Slots(nn.Module):
    """Latents that attend to a row, which attends to them, as in a Perceiver; devices cannot share three of them."""

    num: int
    is_recognized: bool = True

    @nn.compact
    def __call__(self, batch):
        attend = attention.attend if self.is_recognized else softmax_of_all
        x = nn.Embed(VOCAB, WIDTH, **HALF)(batch["tokens"])[:, :, None]
        slots = self.param("slots", nn.initializers.normal(1.0), (self.num, 1, WIDTH), jnp.float64)
        slots = jnp.broadcast_to(slots, (x.shape[0], *slots.shape))
        slots = softmax_of_all(slots, x, x)
        x = x + softmax_of_all(x, slots, slots) + attend(x, slots, slots, causal=False)
        return nn.Dense(VOCAB, **HALF)(x[:, :, 0])


def softmax_of_all(q, k, v, causal=False):
    return of_jax_in_float64(q, k, v, jnp.ones(k.shape[:2], bool), causal)


MODELS["Slots"] = lambda num, is_reference=False: Slots(num, not is_reference)


@pytest.mark.parametrize(("num", "context"), [(3, "ring4"), pytest.param(4, "gather4", marks=pytest.mark.slow)])
def test_keys_that_devices_cannot_share_are_whole_on_each(num, context):
    size, declared = CONTEXTS[context]
    assert max(differences("Slots", num, {"data": 2, "context": size}, declared)) <= 1e-10


def test_more_devices_than_heads_are_refused():
    with pytest.raises(ConfigError, match="1 query heads on each device cannot be divided among the 2 devices"):
        made("Slots", 4, {"data": 2, "context": 2}, {"kind": "ulysses"}).compile_step()


EXPECTED = {
    "by_hand": "without hidden keys",
    "of_jax": "without hidden keys",
    "of_linen": "of visible queries, without hidden keys",
    "of_nnx": "of their own document, scores capped at 2",
}


@pytest.mark.parametrize("way", WAYS)
def test_each_attention_of_a_model_is_found_with_what_hides_its_keys(way):
    encoder, decoder, across = (str(one).partition(": ")[2] for one in made("Translator", way, {"data": 2}).attention)
    assert encoder == f"attention of 48 tokens to all tokens, {EXPECTED[way]}"
    assert decoder == f"attention of 32 tokens to earlier tokens, {EXPECTED[way]}"
    hidden = EXPECTED[way].removeprefix("of visible queries, ").replace("of their own document", "without hidden keys")
    assert across == f"attention of 32 tokens to 48 tokens of another row, {hidden}"


def of_bert(q, k, v, valid):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + (1.0 - valid[:, None, None, :]) * -1e9
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def where_padded(q, k, v, valid):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(~valid[:, None, None], -1e30, scores)), v)


def of_gemma(q, k, v, valid):
    """Flax's Gemma: heads in groups, merged for the mask, which is a window of the padding's."""
    q = jnp.stack([q, jnp.cos(q), jnp.sin(q)], axis=3)
    scores = jnp.einsum("BTKGH,BSKH->BTKGS", q, k).reshape(2, 8, 6, -1)
    scores = jnp.tanh(scores / 2.0) * 2.0
    mask = valid[:, None, :] * jnp.tril(jnp.ones((1, 8, 8), bool))
    ones = jnp.ones(mask.shape, mask.dtype)
    mask = jnp.triu(ones, -4) * jnp.tril(ones, 4) * mask
    weights = jax.nn.softmax(jnp.where(jnp.expand_dims(mask, -2), scores, -2.3819763e38)).reshape(2, 8, 2, 3, -1)
    return jnp.einsum("BTKGS,BSKH->BTKGH", weights, v).reshape(2, 8, 6, 4)


def in_a_loop(q, k, v, valid):
    """The mask of all pairs is made outside of the loop over layers."""
    visible = jnp.tril(jnp.ones((8, 8), bool)) & valid[:, None, None, :]

    def layer(x, _):
        scores = jnp.where(visible, jnp.einsum("bqhd,bkhd->bhqk", x, k), -1e30)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v), None

    return jax.lax.scan(layer, q, None, length=2)[0]


@pytest.mark.parametrize("way", [of_bert, where_padded, of_gemma, in_a_loop])
def test_a_mask_is_found_in_other_ways_of_making_it(way):
    """Values and gradients are those of the program as it was written."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 8, 2, 4))
    valid = jnp.arange(8) < jnp.array([[3], [8]])

    def of(way):
        return jax.jit(jax.value_and_grad(lambda *x: jnp.sin(way(*x, valid)).sum(), (0, 1, 2)))(q, k, v)

    def replaced(*given):
        closed, (found,) = rewritten(jax.make_jaxpr(way)(*given))
        assert "without hidden keys" in str(found)
        return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *given)[0]

    assert largest_difference(of(replaced), of(way)) < 1e-10


@pytest.mark.parametrize(("padded", "kind"), [(False, jax.Array), (True, Documents)])
def test_documents_of_tokens_are_segments_which_every_core_knows(padded, kind, monkeypatch):
    def way(x, segments):
        mask = nn.make_attention_mask(segments, segments, jnp.equal)
        mask = nn.combine_masks(mask, nn.make_attention_mask(segments, segments)) if padded else mask
        return nn.dot_product_attention(x, x, x, mask=nn.combine_masks(mask, nn.make_causal_mask(segments)))

    given = []
    monkeypatch.setattr(operation, "local_attention", lambda q, *_, segments, **more: given.append(segments) or q)
    arrays = jnp.ones((2, 8, 2, 4)), jnp.ones((2, 8), jnp.int32)
    closed, _ = rewritten(jax.make_jaxpr(way)(*arrays))
    jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *arrays)
    assert given and all(isinstance(one, kind) for one in given)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (lambda s, mask, keep: jnp.where(mask[:, None], s, -1e30), "for each pair of a query and a key"),
        (lambda s, mask, keep: s + mask.astype(float)[:, None], r"its scores are changed \(add\)"),
        (lambda s, mask, keep: s + keep[:, None, None, :], r"its scores are changed \(add\)"),
        (lambda s, mask, keep: jnp.where(mask[:, None] | (keep > 0)[:, None, None, :], s, -1e30), "for each pair"),
    ],
    ids=["pairs", "half hidden", "numbers of the data", "either mask"],
)
def test_what_is_no_mask_is_left_as_it_is_written(changed, why):
    def way(q, k, v, mask, keep):
        scores = changed(jnp.einsum("bqhd,bkhd->bhqk", q, k), mask, keep)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    arrays = [jnp.ones((2, 8, 2, 4))] * 3 + [jnp.ones((2, 8, 8), bool), jnp.ones((2, 8))]
    closed = jax.make_jaxpr(way)(*arrays)
    same, (found,) = rewritten(closed)
    assert same is closed
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(str(found))


def test_a_softmax_of_some_of_the_scores_is_left_as_it_is_written_and_said():
    def way(q, k, v, valid):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, where=valid[:, None, None]), v)

    closed = jax.make_jaxpr(way)(*[jnp.ones((2, 8, 2, 4))] * 3, jnp.ones((2, 8), bool))
    same, (found,) = rewritten(closed)
    assert same is closed and r"its scores are changed (sub)" in str(found)


def test_numbers_of_the_data_beside_arrays_change_nothing():
    def codes(x, number, valid):
        return ((x == number) & valid.any() & True).T.reshape(1, 3, 2)

    closed = jax.make_jaxpr(codes)(jnp.ones((2, 3)), 1.0, jnp.ones(3, bool))
    assert rewritten(closed) == (closed, [])


def test_dropout_of_weights_is_left_as_it_is_written_and_said():
    def way(x):
        mask = nn.make_causal_mask(x[:, :, 0, 0])
        key = jax.random.key(0)
        return nn.dot_product_attention(x, x, x, mask=mask, dropout_rng=key, dropout_rate=0.1, deterministic=False)

    closed = jax.make_jaxpr(way)(jnp.ones((1, 8, 2, 4)))
    same, (found,) = rewritten(closed)
    assert same is closed and "its weights are changed before they meet the values, as dropout does" in str(found)


class WithDropout(nn.Module):
    """Its second attention has dropout, its first has none."""

    @nn.compact
    def __call__(self, tokens, rng):
        x = nn.Embed(VOCAB, WIDTH)(tokens)[:, :, None]
        x = nn.dot_product_attention(x, x, x)
        x = nn.dot_product_attention(x, x, x, dropout_rng=rng, dropout_rate=0.1, deterministic=False)
        return nn.Dense(VOCAB)(x[:, :, 0])


def test_attention_of_shared_rows_that_no_core_computes_is_refused_with_its_line():
    given = batch("Decoder")

    def loss(params, batch, key):
        logits = WithDropout().apply({"params": params}, batch["tokens"], key)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    line = r"test_recognized_masks\.py:\d+ \(WithDropout\.__call__\): attention of 32 tokens is computed as it is"
    with pytest.raises(ConfigError, match=rf"not for this model\n.*{line} written: its weights are changed"):
        training(
            lambda key: WithDropout().init(key, given["tokens"][:1], key)["params"], loss, optax.sgd(0.1), given,
            draws=True, mesh=MeshLayout(context=8), rules=AxisRules(preset=["context"], unnamed=()),
            batch_dims=dict.fromkeys(given, ("batch", "seq")), parallel=Parallel(context="ring"),
        )  # fmt: skip


def test_planted_a_mask_of_the_data_that_nobody_notices_is_found(monkeypatch):
    monkeypatch.setattr(operation, "_documents", lambda *conditions: None)
    assert max(differences("Encoder", "by_hand", {"data": 2})) > 1e-6


def test_planted_documents_that_a_ring_does_not_send_are_found(monkeypatch):
    from meshpar.nn.attention.shards import Shards

    monkeypatch.setattr(Shards, "sent_after", lambda self, x, segments: jnp.zeros_like(segments))
    assert max(differences("Encoder", "by_hand", {"context": 2}, {"kind": "ring"})) > 1e-6


def reference(q, k, v, visible, cap):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, jnp.repeat(k, 2, 2)) / np.sqrt(q.shape[-1])
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e30))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, jnp.repeat(v, 2, 2))


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "causal", "cap"),
    [(300, 170, False, None), (40, 300, False, 2.0), (300, 300, True, 1.0)],
)
def test_the_function_equals_a_softmax_of_all_pairs(num_queries, num_keys, causal, cap):
    """Blocks of 128 tokens do not divide these rows; the first keys of each are hidden, so some queries see nothing."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, num_queries, 4, 8))
    k, v = rng.normal(size=(2, 2, num_keys, 2, 8))
    valid = jnp.array((rng.random((2, num_keys)) < 0.6) & (np.arange(num_keys) > 2))
    visible = valid[:, None, None, :] & (np.tril(np.ones((num_queries, num_keys), bool)) if causal else True)

    def of(function):
        return jax.jit(jax.value_and_grad(lambda *x: jnp.sin(function(*x)).sum(), (0, 1, 2)))(q, k, v)

    found = of(lambda q, k, v: attention.attend(q, k, v, causal=causal, cap=cap, valid=valid))
    assert largest_difference(found, of(lambda q, k, v: reference(q, k, v, visible, cap))) < 1e-10


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, r"8 queries and 6 keys: causal=True compares places in one row; causal=False, and valid for padding"),
        ({"causal": False, "segments": jnp.zeros((1, 8), jnp.int32)}, "8 queries and 6 keys: segments are documents"),
        ({"causal": False, "cap": 0.0}, r"cap=0\.0: has to be positive"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(more, message):
    with pytest.raises(ValueError, match=message):
        attention.attend(jnp.ones((1, 8, 2, 4)), *[jnp.ones((1, 6, 2, 4))] * 2, **more)
