"""Layers and models: attention, rotary embeddings, padding, dropout, custom gradients and the names of dims."""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jaxtyping import TypeCheckError

from meshpar.errors import ShardingError
from meshpar.models import GPT, Llama
from meshpar.nn.attention.reference import Reference, causal, dot_product_attention
from meshpar.nn.describe import describe, functional
from meshpar.nn.layers import dropout, silu_product
from meshpar.nn.rotary import Interpolated, Llama3, _rotate, apply_rope, rope_angles
from meshpar.partition import matmul as products
from meshpar.partition.matmul import MANY_TOKENS, matmul
from meshpar.train.token_loss import cross_entropy
from meshpar.tree import flatten_with_paths
from tests.comparison import largest_difference

SIZES = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 29,
    "max_seq_len": 8,
}


def batch(rows=2, seq=8):
    tokens = jax.random.randint(jax.random.key(0), (rows, seq), 0, 29, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32), (rows, seq))
    return {
        "tokens": tokens,
        "positions": positions,
        "segments": jnp.ones((rows, seq), jnp.int32),
        "rows": jnp.arange(rows, dtype=jnp.int32),
    }


def logits(model, inputs, key=None):
    built = model.build(nnx.Rngs(0))
    return jax.jit(functional(built))(nnx.to_pure_dict(nnx.state(built, nnx.Param)), inputs, key)


@pytest.mark.parametrize("model", [Llama(**SIZES), GPT(**SIZES, tie_embeddings=True)], ids=["llama", "gpt"])
def test_a_token_sees_only_what_comes_before_it_in_its_document(model):
    inputs = batch()
    first_half = jnp.arange(8, dtype=jnp.int32) < 4
    two_documents = inputs | {"segments": jnp.broadcast_to(jnp.where(first_half, 1, 2).astype(jnp.int32), (2, 8))}
    changed_late = inputs | {"tokens": inputs["tokens"].at[:, 6].add(1) % 29}
    np.testing.assert_allclose(logits(model, inputs)[:, :6], logits(model, changed_late)[:, :6], rtol=1e-5, atol=1e-6)
    assert abs(logits(model, inputs)[:, 6:] - logits(model, changed_late)[:, 6:]).max() > 1e-4
    changed_early = two_documents | {"tokens": inputs["tokens"].at[:, 1].add(1) % 29}
    np.testing.assert_allclose(
        logits(model, two_documents)[:, 4:], logits(model, changed_early)[:, 4:], rtol=1e-5, atol=1e-6
    )


def test_attention_is_softmax_of_scaled_products_over_grouped_heads():
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 5, heads, 4)) for i, heads in enumerate((4, 2, 2)))
    got = dot_product_attention(q, k, v, causal(jnp.ones((2, 5), jnp.int32)))
    for head in range(4):
        scores = np.einsum("bsh,bth->bst", q[:, :, head], k[:, :, head // 2]) / 2
        weights = np.exp(np.where(np.tril(np.ones((5, 5))) > 0, scores, -np.inf))
        want = np.einsum("bst,bth->bsh", weights / weights.sum(-1, keepdims=True), v[:, :, head // 2])
        np.testing.assert_allclose(got[:, :, head], want, rtol=2e-5, atol=1e-6)


def test_a_model_chooses_its_attention_core():
    class Doubled(Reference):
        def __call__(self, *args):
            return 2 * super().__call__(*args)

    class Other(Llama):
        attention: ClassVar = Doubled()

    assert abs(logits(Other(**SIZES), batch()) - logits(Llama(**SIZES), batch())).max() > 1e-4


def test_rotary_products_depend_on_the_distance_alone():
    q, k = (jax.random.normal(jax.random.key(i), (1, 1, 1, 8)) for i in range(2))

    def product(i, j):
        def at(x, p):
            return apply_rope(x, rope_angles(jnp.full((1, 1), p, jnp.int32), 8, 10000.0, x.dtype))

        return float((at(q, i) * at(k, j)).sum())

    assert product(3, 1) == pytest.approx(product(9, 7), abs=1e-5)
    assert product(3, 1) != pytest.approx(product(3, 2), abs=1e-3)


def test_rope_rotates_part_of_a_head_and_leaves_the_rest():
    x = jax.random.normal(jax.random.key(0), (1, 3, 2, 8))
    positions = jnp.arange(3, dtype=jnp.int32)[None]
    rotated = apply_rope(x, rope_angles(positions, 4, 10000.0, x.dtype))
    np.testing.assert_array_equal(rotated[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(rotated[..., :4], apply_rope(x[..., :4], rope_angles(positions, 4, 10000.0, x.dtype)))
    assert abs(rotated[:, 1:, :, :4] - x[:, 1:, :, :4]).max() > 1e-2


def test_interpolated_angles_equal_those_of_closer_positions():
    positions = jnp.arange(0, 64, 8, dtype=jnp.int32)[None]
    plain, linear = (
        rope_angles(p, 8, 1e4, jnp.dtype("float32"), s)
        for p, s in ((positions // 8, None), (positions, Interpolated(factor=8.0)))
    )
    np.testing.assert_allclose(linear, plain, rtol=1e-6)
    llama3 = Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=64)
    frequencies = 2 * np.pi * jnp.array([5.0, 2.5, 0.5]) / 64  # turns in 64 tokens: many, some, few
    np.testing.assert_allclose(llama3(frequencies) / frequencies, [1.0, 0.5 + 0.5 / 8, 1 / 8], rtol=1e-6)


def test_a_window_hides_tokens_further_back_except_in_global_layers():
    model = Llama(**SIZES, window=3, global_layers=(1,))
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 8, 2, 4)) for i in range(3))

    def attended(v, layer):
        return dot_product_attention(q, k, v, causal(jnp.ones((1, 8), jnp.int32), model.window_of(jnp.int32(layer))))

    for layer, sees_the_first in ((0, [True] * 3 + [False] * 5), (1, [True] * 8)):
        differs = np.abs(attended(v, layer) - attended(v.at[:, 0].add(1.0), layer)).max((0, 2, 3)) > 1e-6
        np.testing.assert_array_equal(differs, sees_the_first)
    assert Llama(**SIZES).window_of(jnp.int32(0)) is None


def test_biases_and_head_norms_are_where_the_config_says():
    def paths(**options):
        return set(flatten_with_paths(describe(nnx.eval_shape(lambda: Llama(**SIZES, **options).build(nnx.Rngs(0))))))

    of_qkv = {f"blocks.attn.{name}.bias" for name in "qkv"}
    assert paths(attn_bias="qkv") - paths() == of_qkv
    assert paths(attn_bias="all") - paths() == of_qkv | {"blocks.attn.o.bias"}
    assert paths(mlp_bias=True) - paths() == {f"blocks.mlp.{name}.bias" for name in ("gate", "up", "down")}
    assert paths(qk_norm=True) - paths() == {f"blocks.attn.{name}_norm.scale" for name in "qk"}


def test_cross_entropy_equals_optax_and_padding_gets_no_probability():
    x = jax.random.normal(jax.random.key(0), (2, 5, 12))
    targets = jax.random.randint(jax.random.key(1), (2, 5), 0, 9, jnp.int32)
    want = optax.softmax_cross_entropy_with_integer_labels(x[..., :9], targets)
    np.testing.assert_allclose(cross_entropy(x, targets, 9), want, rtol=1e-5)
    grads = jax.grad(lambda x: cross_entropy(x, targets, 9).sum())(x)
    assert abs(grads[..., 9:]).max() == 0 and abs(grads[..., :9]).max() > 0


def test_a_padded_vocabulary_changes_neither_loss_nor_gradients():
    plain = Llama(**SIZES)
    padded = Llama(**SIZES, pad_vocab_to_multiple=16)
    assert padded.padded_vocab == 32
    params = nnx.to_pure_dict(nnx.state(plain.build(nnx.Rngs(0)), nnx.Param))
    grown = params | {
        "embedding": jnp.pad(params["embedding"], ((0, 3), (0, 0))),
        "head": jnp.pad(params["head"], ((0, 0), (0, 3))),
    }
    inputs = batch()
    targets = jnp.ones((2, 8), jnp.int32)

    def loss(model):
        apply = functional(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))
        return jax.value_and_grad(lambda p: cross_entropy(apply(p, inputs, None), targets, 29).sum())

    want, want_grads = loss(plain)(params)
    got, got_grads = loss(padded)(grown)
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    np.testing.assert_allclose(got_grads["head"][:, :29], want_grads["head"], rtol=1e-4, atol=1e-5)
    assert abs(got_grads["head"][:, 29:]).max() == 0


def test_padded_layers_are_zeros_that_change_nothing():
    def grads(model):
        built = model.build(nnx.Rngs(0))
        apply = functional(built)
        params = nnx.to_pure_dict(nnx.state(built, nnx.Param))
        return params["blocks"], jax.grad(lambda p: jnp.square(apply(p, batch(), None)).mean())(params)["blocks"]

    padded = Llama(**SIZES, pad_layers_to_multiple=3)
    assert (padded.num_layers, padded.layer_stack().stacked_layers) == (2, 3)
    for found, expected in zip(jax.tree.leaves(grads(padded)), jax.tree.leaves(grads(Llama(**SIZES))), strict=True):
        np.testing.assert_array_equal(found[:2], expected)
        assert not found[2].any()


def test_dropout_keeps_the_mean_and_drops_the_given_share():
    x = jnp.ones((64, 32, 16))
    kept = dropout(x, 0.25, jax.random.key(1), jnp.arange(64, dtype=jnp.int32))
    assert float((kept == 0).mean()) == pytest.approx(0.25, abs=0.01)
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.02)


def test_dropout_of_a_row_depends_on_its_index_in_the_global_batch():
    x = jnp.ones((8, 4, 16))
    rows = jnp.arange(8, dtype=jnp.int32)
    whole = dropout(x, 0.5, jax.random.key(1), rows)
    np.testing.assert_array_equal(dropout(x[4:], 0.5, jax.random.key(1), rows[4:]), whole[4:])
    assert (whole[0] != whole[1]).any()
    assert (dropout(x, 0.5, jax.random.key(2), rows) != whole).any()
    assert dropout(x, 0.5, None, rows) is x


@jax.custom_vjp
def doubled_gradient(x):
    return jnp.sin(x)


doubled_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, grad: (2 * grad * jnp.cos(x),))
OWN_GRADIENTS = [
    (silu_product, [(2, 3, 8), (2, 3, 8)]),
    (matmul, [(2, 3, 4), (4, 8)]),
    (matmul, [(2, 3, 8), (8, 4)]),
    (matmul, [(2, 3, 8), (8, 2), (8, 4)]),
    (_rotate, [(2, 3, 4, 8), (2, 3, 1, 3), (2, 3, 1, 3)]),
]


def gradient_error(fn, shapes):
    """The largest difference of a `custom_vjp` from autodiff of the same function, with respect to its activations."""
    keys = jax.random.split(jax.random.key(0), len(shapes) + 1)
    args = [jax.random.normal(key, shape, jnp.float64) for key, shape in zip(keys, shapes, strict=False)]
    num_rotated = 1 if fn is _rotate else len(args)  # angles have no gradient

    def gradients(fn):
        out, vjp = jax.vjp(lambda *some: fn(*some, *args[num_rotated:]), *args[:num_rotated])
        return vjp(jax.random.normal(keys[-1], out.shape, out.dtype))

    return largest_difference(gradients(fn), gradients(fn.fun))


@pytest.mark.parametrize(("fn", "shapes"), OWN_GRADIENTS)
def test_custom_gradients_equal_autodiff(fn, shapes):
    with jax.enable_x64(True):
        assert gradient_error(fn, shapes) < 1e-13


@pytest.mark.parametrize("shapes", [shapes for fn, shapes in OWN_GRADIENTS if fn is matmul])
def test_the_custom_gradients_of_a_product_of_many_tokens_equal_autodiff(shapes, monkeypatch):
    monkeypatch.setattr(products, "MANY_TOKENS", 1)
    with jax.enable_x64(True):
        assert gradient_error(matmul, shapes) < 1e-13


def test_control_a_wrong_custom_gradient_is_seen():
    with jax.enable_x64(True):
        assert gradient_error(doubled_gradient, [(4,)]) > 0.1


MANY = MANY_TOKENS // 2


@pytest.mark.parametrize(
    ("shapes", "transposed"),
    [
        ([(2, 3, 4), (4, 8)], (2, 3, 4)),
        ([(2, 3, 8), (8, 4)], (2, 3, 4)),
        ([(2, MANY, 4), (4, 8)], (MANY_TOKENS, 4)),
        ([(2, MANY, 8), (8, 4)], (MANY_TOKENS, 4)),
    ],
)
def test_the_gradient_of_a_weight_transposes_the_smaller_side(shapes, transposed):
    args = [jnp.ones(shape) for shape in shapes]
    program = jax.make_jaxpr(jax.grad(lambda x, w: matmul(x, w).sum(), 1))(*args)
    [product] = [eqn for eqn in program.eqns if eqn.primitive.name == "dot_general" and eqn.outvars[0].aval.ndim == 2]
    assert product.invars[0].aval.shape == transposed


@pytest.mark.sample(2)
@pytest.mark.parametrize("remat", ["dots", "dots_no_batch", "full", {"save": ["attn", "residual"]}], ids=str)
def test_remat_changes_no_gradient(remat):
    def grads(model):
        built = model.build(nnx.Rngs(0))
        apply = functional(built)
        params = nnx.to_pure_dict(nnx.state(built, nnx.Param))
        return jax.jit(jax.grad(lambda p: jnp.square(apply(p, batch(), None)).mean()))(params)

    pairs = zip(
        jax.tree.leaves(grads(Llama(**SIZES))), jax.tree.leaves(grads(Llama(**SIZES, remat=remat))), strict=True
    )
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


def test_every_parameter_has_a_name_for_each_dim():
    specs = flatten_with_paths(describe(nnx.eval_shape(lambda: Llama(**SIZES).build(nnx.Rngs(0)))))
    assert specs["blocks.attn.q.kernel"].dims == ("layers", "embed", "heads", "head_dim")
    assert specs["embedding"].dims == ("vocab", "embed")


@pytest.mark.parametrize("model", [Llama(**SIZES, num_kv_heads=2), GPT(**SIZES)], ids=["llama", "gpt"])
def test_the_weights_of_a_layer_are_those_of_its_kernels(model):
    arrays = flatten_with_paths(model.array_specs()["blocks"])
    kernels = sum(math.prod(spec.shape[1:]) for path, spec in arrays.items() if path.endswith(".kernel"))
    assert model.weights_of_a_layer == kernels


def test_a_parameter_without_names_is_an_error_that_lists_it():
    class Bare(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones((2, 3)))

    with pytest.raises(ShardingError, match=r"kernel\n.*2 dims \(2, 3\)"):
        describe(Bare())


def test_query_heads_must_be_a_multiple_of_key_heads():
    with pytest.raises(ValueError, match="num_heads = 4 is not a multiple of num_kv_heads = 3"):
        Llama(**SIZES, num_kv_heads=3)


def test_a_global_layer_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="global_layers: there is no layer 2, only 0 to 1"):
        Llama(**SIZES, window=3, global_layers=(2,))


def test_shapes_in_signatures_are_checked():
    """conftest installs the check, which refuses keys of another batch and integer logits."""
    q = jnp.ones((2, 8, 4, 4))
    tokens = jnp.zeros((2, 8), jnp.int32)
    assert dot_product_attention(q, q, q, causal(tokens)).shape == q.shape
    with pytest.raises(TypeCheckError, match="k_BTKh"):
        dot_product_attention(q, q[:1], q, causal(tokens))
    with pytest.raises(TypeCheckError, match="logits"):
        cross_entropy(tokens[..., None], tokens, 1)
