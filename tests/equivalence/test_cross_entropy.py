"""`meshpar.cross_entropy` in models that never heard of a mesh, beside Optax's on one device."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import lru_cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import AxisRules, MeshLayout, cross_entropy, training
from meshpar.errors import ConfigError
from meshpar.inspection.program.hlo import collectives_of
from meshpar.verification.trial import Trial
from tests.comparison import largest_difference

ROWS, SEQ, WIDTH, VOCAB, CHUNK = 8, 24, 16, 160, 12
TERMS = {"label_smoothing": 0.1, "z_loss": 0.02, "cap": 3.0}


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


class Backbone(nn.Module):
    """Embeddings, a hidden layer, and a head that the loss applies."""

    tied: bool = False

    @nn.compact
    def __call__(self, tokens):
        names = {"kernel_init": nn.with_partitioning(nn.initializers.normal(), ("embed", "mlp"))}
        table = nn.Embed(VOCAB, WIDTH, embedding_init=of(("vocab", "embed")), param_dtype=jnp.float64, name="table")
        x = table(tokens)
        x = x + nn.tanh(nn.Dense(WIDTH, use_bias=False, param_dtype=jnp.float64, name="up", **names)(x))
        if self.tied:
            return x, table.embedding.T
        return x, self.param("head", of(("embed", "vocab")), (WIDTH, VOCAB), jnp.float64)


def of(dims):
    return nn.with_partitioning(nn.initializers.normal(1.0), dims)


@lru_cache
def batch():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, SEQ + 1), dtype=np.int32)
    targets = np.where(np.arange(SEQ) < np.arange(3, 3 + ROWS)[:, None] * 2, tokens[:, 1:], -100)
    return {"tokens": tokens[:, :-1], "targets": targets}


def chunked(tied=False, chunk=CHUNK, **terms):
    def loss(params, batch, key):
        hidden, head = Backbone(tied).apply({"params": params}, batch["tokens"])
        return cross_entropy(hidden, head, batch["targets"], chunk=chunk, **terms)

    return loss


def of_optax(hidden, head, labels, label_smoothing=0.0, z_loss=0.0, cap=None):
    logits = hidden @ head
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    counted = labels >= 0
    wanted = optax.smooth_labels(jax.nn.one_hot(jnp.where(counted, labels, 0), VOCAB), label_smoothing)
    each = optax.softmax_cross_entropy(logits, wanted) + z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    return jnp.where(counted, each, 0).sum(), counted.sum()


def init(tied=False):
    return lambda key: nn.unbox(Backbone(tied).init(key, batch()["tokens"][:1])["params"])


CASES_OF_ONE_DEVICE = [
    ((ROWS, SEQ), CHUNK, {}),
    *(((ROWS, SEQ), chunk, TERMS) for chunk in (CHUNK, 7 * ROWS, "none")),
    ((ROWS * SEQ,), 100, TERMS),
    ((2, ROWS // 2, SEQ), CHUNK, TERMS),
]


@pytest.mark.parametrize(("shape", "chunk", "terms"), CASES_OF_ONE_DEVICE)
def test_one_device_has_the_sum_and_the_gradients_of_optax(shape, chunk, terms):
    rng = np.random.default_rng(1)
    hidden, head = rng.normal(size=(*shape, WIDTH)), rng.normal(size=(WIDTH, VOCAB))
    labels = batch()["targets"].reshape(shape)

    def of(function):
        return jax.jit(jax.value_and_grad(lambda *x: function(*x) * 0.3, (0, 1)))(hidden, head)

    found = of(lambda hidden, head: cross_entropy(hidden, head, labels, chunk=chunk, **terms).loss)
    assert largest_difference(found, of(lambda hidden, head: of_optax(hidden, head, labels, **terms)[0])) < 1e-10
    assert cross_entropy(hidden, head, labels).count == (labels >= 0).sum()


LAYOUTS = {
    "tensor4": ({"data": 2, "tensor": 4}, ("megatron",)),
    "sp": ({"data": 2, "tensor": 4}, ("megatron_sp",)),
    "fsdp": ({"data": 2, "fsdp": 2, "tensor": 2}, ("fsdp", "megatron")),
    "zero1": ({"data": 8}, ("zero1",)),
}
CASES = [
    (layout, lowering, tied)
    for layout in LAYOUTS
    for lowering in ("manual", "auto")
    for tied in (False, True)
    if (layout, lowering) != ("sp", "auto")
]
SAMPLE = {("tensor4", "manual", False), ("fsdp", "manual", True), ("fsdp", "auto", False)}


@lru_cache
def made(layout, lowering="manual", tied=False, chunk=CHUNK):
    sizes, preset = LAYOUTS[layout]
    return training(
        lambda key: Backbone(tied).init(key, batch()["tokens"][:1])["params"], chunked(tied, chunk, **TERMS),
        optax.sgd(0.1), batch(), mesh=MeshLayout(**sizes), rules=AxisRules(preset=preset), lowering=lowering,
        batch_dims=dict.fromkeys(batch(), ("batch", "seq")), compute_dtype=np.dtype("float64"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "lowering", "tied"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow) for case in CASES],
)
def test_each_layout_has_the_gradients_of_one_device(layout, lowering, tied):
    made_ = made(layout, lowering, tied)
    params = init(tied)(jax.random.key(0))

    def mean(params, batch):
        total, count = of_optax(*Backbone(tied).apply({"params": params}, batch["tokens"]), batch["targets"], **TERMS)
        return total / count

    loss, grads = jax.jit(jax.value_and_grad(mean))(params, batch())
    state = made_.compile_init()()
    placed = jax.tree.map(lambda x, like: jax.device_put(jnp.array(x), like.sharding), params, state.params)
    _, metrics, found = Trial(made_)._step(replace(state, params=placed), made_.put(batch()))
    assert abs(metrics["loss"] - loss) < 1e-10
    assert largest_difference(jax.device_get(found), jax.device_get(grads)) < 1e-10


def test_a_sharded_vocabulary_is_neither_gathered_nor_held():
    """The largest array with a dim of the local vocabulary has the logits of one chunk; messages have none."""
    made_ = made("tensor4")
    width, rows = VOCAB // 4, ROWS // 2
    text = made_.compile_step().text
    shapes = [tuple(map(int, dims.split(","))) for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text)]
    assert max(math.prod(x) for x in shapes if width in x) == max(CHUNK, WIDTH) * width < rows * SEQ * width
    sent = [x.shape for one in collectives_of(text, made_.mesh) if "tensor" in one.axes for x in one.arrays]
    assert all(width not in shape and VOCAB not in shape for shape in sent)


def test_planted_a_vocabulary_that_nobody_sums_is_found(monkeypatch):
    from meshpar.train import token_loss

    of_shards = token_loss.cross_entropy
    monkeypatch.setattr(token_loss, "cross_entropy", lambda *args: of_shards(*args[:-1], ()))
    made.cache_clear()
    with pytest.raises((AssertionError, ValueError, TypeError)):
        test_each_layout_has_the_gradients_of_one_device("tensor4", "manual", tied=False)
    made.cache_clear()


# Losses that know nothing of a mesh: [batch, seq, vocab], [batch, seq] -> [batch, seq].


def with_one_hots(logits, labels):
    return optax.softmax_cross_entropy(logits, optax.smooth_labels(jax.nn.one_hot(labels, VOCAB), 0.1))


def by_hand(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)


OTHERS = (optax.softmax_cross_entropy_with_integer_labels, with_one_hots, by_hand)


@pytest.mark.parametrize("each", OTHERS, ids=lambda each: each.__name__)
def test_no_cross_entropy_gathers_logits(each):
    """Devices that share the vocabulary send numbers of one token, whether the plan is asked or the compiled step."""

    def loss(params, batch, key):
        hidden, head = Backbone().apply({"params": params}, batch["tokens"])
        return each(hidden @ head, jnp.maximum(batch["targets"], 0)).mean()

    sizes, preset = LAYOUTS["tensor4"]
    made_ = training(
        lambda key: Backbone().init(key, batch()["tokens"][:1])["params"], loss, optax.sgd(0.1), batch(),
        mesh=MeshLayout(**sizes), rules=AxisRules(preset=preset), batch_dims=dict.fromkeys(batch(), ("batch", "seq")),
    )  # fmt: skip
    assert not [one for one in map(str, made_.activations) if str(VOCAB) in one]
    assert any("all-reduce over tensor: float64[8/data, 24]" in str(one) for one in made_.activations)
    if each is OTHERS[0]:
        sent = [x.shape for one in collectives_of(made_.compile_step().text, made_.mesh) for x in one.arrays
                if "tensor" in one.axes]  # fmt: skip
        assert {shape for shape in sent if shape} == {(4, 24, WIDTH), (4, 24, WIDTH // 4), (4, 24, 1), (4, 24)}


@pytest.mark.parametrize("name", ["chunk", "z_loss"])
def test_an_option_of_a_loss_is_refused_with_the_function_that_has_it(name):
    with pytest.raises(ConfigError, match=rf"{name}\n.*no such argument\n.*meshpar\.cross_entropy\(.*{name}=\.\.\.\)"):
        training(None, None, None, {}, mesh="data=8", rules="fsdp", **{name: 1})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ((2, 3, 4), (8, 4), (2, 3)),
            r"head \(8, 4\), labels .* of an embedding pass embedding\.T",
        ),
        (((2, 3, 4), (4, 8), (3,)), r"labels \(3,\)"),
        (((2, 3, 4), (4, 8), (2, 3), {"chunk": 0}), "chunk=0: has to be auto, none, or a number"),
        (((2, 3, 4), (4, 8), (2, 3), {"cap": -1.0}), r"cap=-1\.0: has to be positive"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(arguments, message):
    *shapes, more = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    hidden, head, labels = map(jnp.ones, shapes)
    with pytest.raises(ValueError, match=message):
        cross_entropy(hidden, head, labels.astype(int), **more)
