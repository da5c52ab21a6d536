"""Matrices, tables and vectors are found by their use, whatever a model calls its dims and stacks."""

from __future__ import annotations

from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from meshpar import explain, prepare
from meshpar.experiment.config import Run
from meshpar.interop import user_code
from meshpar.optim import uses
from meshpar.optim.base import Matrix
from meshpar.optim.uses import matrices
from meshpar.tree import flatten_with_paths

LAYERS = 3
TOKENS = jnp.zeros((2, 6), jnp.int32)


@pytest.fixture(autouse=True, scope="module")
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        normed = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(normed, normed)
        return x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.RMSNorm()(x)))), None


class Model(nn.Module):
    axis: str | None

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 8)(tokens)
        if self.axis is None:
            x = Block()(x)[0]
        else:
            stacked = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(nn.remat(Block), length=LAYERS, metadata_params={nn.PARTITION_NAME: self.axis}, **stacked)()(
                x, None
            )
        return nn.Dense(32)(nn.Conv(8, (3,))(x))


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.linear = nnx.LinearGeneral(8, (4, 2), rngs=rngs)
        self.out = nnx.LinearGeneral((4, 2), 8, axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        return x + self.out(jnp.tanh(self.linear(self.norm(x))))


class Stack(nnx.Module):
    def __init__(self, how, rngs):
        self.layers = nnx.vmap(Layer)(rngs.split(LAYERS))
        self.how = how

    def __call__(self, x):
        if self.how == "scan":
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        if self.how == "vmap":
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.layers, x).mean(0)
        graph, state = nnx.split(self.layers)
        for i in range(LAYERS):
            x = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))(x)
        return x


def used(loss, params, *arguments):
    return flatten_with_paths(matrices(jax.make_jaxpr(loss)(params, *arguments), params))


@pytest.mark.parametrize("axis", [None, "layers", "layer", "blocks"])
def test_kernels_and_embeddings_of_linen_are_matrices(axis):
    model = Model(axis)
    params = nn.unbox(jax.eval_shape(lambda: model.init(jax.random.key(0), TOKENS)["params"]))
    found = used(lambda params, tokens: model.apply({"params": params}, tokens).sum(), params, TOKENS)
    assert {path for path, one in found.items() if one.outputs} == {
        path for path in found if path.endswith(("kernel", "embedding"))
    }
    assert [path for path, one in found.items() if one.is_table] == ["Embed_0.embedding"]
    (query,) = [one for path, one in found.items() if path.endswith("query.kernel")]
    start = 0 if axis is None else 1
    assert (query.inputs, query.outputs) == ((start,), (start + 1, start + 2))


@pytest.mark.parametrize("how", ["scan", "vmap", "loop"])
def test_layers_that_nnx_stacks_have_the_matrices_of_one_layer(how):
    graph, params = nnx.split(nnx.eval_shape(lambda: Stack(how, nnx.Rngs(0))))
    params = nnx.to_pure_dict(params)
    found = used(lambda params, x: nnx.merge(graph, nnx.State(params))(x).sum(), params, jnp.ones((2, 5, 8)))
    assert {path: (one.inputs, one.outputs) for path, one in found.items() if one.outputs} == {
        "layers.linear.kernel": ((1,), (2, 3)),
        "layers.out.kernel": ((1, 2), (3,)),
    }


OF_MUON = "adam, as muon does for embeddings, the head, norms and biases, weight decay 0.1"


def test_a_tied_table_is_a_matrix():
    """As in T5: its rows are looked up, and it projects the logits. It was a vector, and did not decay."""

    class Tied(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(32, 8)
            return embed.attend(nn.Dense(8)(embed(tokens)))

    params = jax.eval_shape(lambda: Tied().init(jax.random.key(0), TOKENS)["params"])
    loss = jax.make_jaxpr(lambda params: Tied().apply({"params": params}, TOKENS).sum())(params)
    found = flatten_with_paths(matrices(loss, params))["Embed_0.embedding"]
    assert (found.inputs, found.outputs, found.is_table) == ((0,), (1,), True)


SIZES = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "intermediate_size": 8, "vocab_size": 32}
EXPERTS = {"num": 4, "per_token": 2, "intermediate_size": 8, "first_dense": 1}
OWN = {
    "llama": ({"kind": "llama", "num_kv_heads": 2, "qk_norm": True, "attn_bias": "qkv"}, {}),
    "gpt, tied": ({"kind": "gpt", "tie_embeddings": True}, {}),
    "places of experts": ({"kind": "llama", "experts": EXPERTS | {"dispatch": "capacity", "shared": 1}}, {}),
    "experts, chunks of the loss": ({"kind": "llama", "experts": EXPERTS}, {"loss": {"chunk": 4}}),
}
"""Models, and further keys of their runs."""


def kinds_of_own(name):
    """How the loss of one of meshpar's decoders uses each parameter, and what the names of its dims say."""
    model, more = OWN[name]
    data = {"kind": "synthetic", "vocab_size": 32, "batch_size": 4, "seq_len": 8}
    run = Run(**{"model": SIZES | model, "data": data, "optim": {"kind": "adamw", "lr": 1e-3}, "num_steps": 2,
                 "run_dir": "unused", **more})  # fmt: skip
    prepared = prepare(run, run.mesh.abstract())
    by_name = {path: Matrix.of(spec.dims) for path, spec in flatten_with_paths(prepared.specs).items()}
    found = flatten_with_paths(prepared.kinds)
    return [{path: (one, one.is_table) for path, one in each.items()} for each in (found, by_name)]


@pytest.mark.parametrize("name", OWN)
def test_meshpars_own_decoders_use_their_parameters_as_their_dims_say(name):
    found, by_name = kinds_of_own(name)
    assert found == by_name


def test_control_an_operation_that_is_not_followed_hides_what_it_multiplies(monkeypatch):
    monkeypatch.setattr(uses, "partitioned_p", None)
    found, by_name = kinds_of_own("llama")
    assert [path for path in found if found[path] != by_name[path]] == ["head"]


@pytest.mark.parametrize(
    ("optim", "kernel", "table"),
    [
        ({"kind": "adamw"}, "adamw, weight decay 0.1", "adamw, weight decay 0.1"),
        ({"kind": "muon"}, "muon, weight decay 0.1", OF_MUON),
        ({"kind": "sgd"}, "sgd, no weight decay", "sgd, no weight decay"),
    ],
)
def test_explain_says_what_updates_each_parameter_of_an_imported_model(optim, kernel, table, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    user_code.permit("tests.effect.own:build", None)
    run = Run(
        model={"kind": "import", "target": "tests.effect.own:build"},
        data={"kind": "synthetic", "vocab_size": 320, "batch_size": 8, "seq_len": 8, "documents_in_row": "joined"},
        optim=optim | {"lr": 1e-3}, mesh={"data": 2}, num_steps=2, run_dir="unused", lowering="auto",
    )  # fmt: skip
    updates = explain(run).updates
    assert updates["up.kernel"] == kernel
    assert updates["table"] == updates["head.kernel"] == table
    assert updates["norm.scale"].endswith("no weight decay") and updates["up.bias"].endswith("no weight decay")
    assert f"    {kernel}" in str(explain(run)).splitlines()
    assert explain(run).as_json()["arrays"]["up.kernel"]["update"] == kernel
