"""Names that are inferred from a model's products are those that its author would declare."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from meshpar import AxisRules, MeshLayout, infer_dims, training
from meshpar.cost.traced import traced_collectives, traffic
from meshpar.errors import ConfigError, ShardingError
from meshpar.interop.declared import declared_dims
from meshpar.partition.inferred import _Observed
from tests.zoo import MODELS
from tests.zoo.reference import first

SAME = {"heads": "mlp", "kv_heads": "mlp", "head_dim": "unnamed", "vocab": "unnamed"}
"""The names that only a person can tell apart, and those that products do not tell."""


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


class Variables(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def test_names_of_the_variables_of_nnx_are_those_that_a_training_takes():
    graph, params = nnx.split(nnx.eval_shape(lambda: Variables(nnx.Rngs(0))))
    batch = {"x": jnp.ones((8, 8))}

    def loss(params, batch, key):
        return jnp.square(nnx.merge(graph, params)(batch["x"])).mean()

    dims = infer_dims(params, loss, batch)
    assert dims["up.kernel"] == ("unnamed", "mlp")
    rules = AxisRules(preset="megatron", unnamed=())
    made = training(
        Variables, lambda model, batch: loss(nnx.state(model), batch, None), optax.sgd(0.1), batch,
        mesh="data=4 tensor=2", rules=rules, dims=dims,
    )  # fmt: skip
    assert "tensor" in str(made.placement.params["up"]["kernel"].get_value().pspec)


def boxed(zoo):
    return jax.eval_shape(zoo.init, jax.random.key(0))


def inferred(name):
    zoo = MODELS[name]()
    key = jax.random.key(0) if zoo.draws else None
    return zoo, infer_dims(first(zoo.init, jax.random.key(0)), zoo.loss, zoo.batch, key)


class Regularized(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(32, name="up")(x))
        x = nn.Dense(8, name="down")(nn.Dropout(0.1, deterministic=not train)(nn.relu(x)))
        return x * self.param("scale", nn.with_logical_partitioning(nn.initializers.ones, ("own",)), (8,))


@pytest.mark.parametrize("make", [Regularized, lambda: Variables], ids=["linen", "nnx"])
def test_a_training_infers_the_names_of_a_module_that_declares_none(make):
    batch = {"x": jnp.ones((8, 8))}

    def loss(model, batch, key):
        more = {"rngs": {"dropout": key}} if make is Regularized else {}
        return jnp.square(model(batch["x"], **more)).mean()

    names = infer_dims(make(), loss, batch)
    assert names["up.kernel"] == ("unnamed", "mlp")
    own = {"own": ("tensor",)} if make is Regularized else {}
    rules = AxisRules(preset="megatron", unnamed=(), **own)

    def made(dims):
        return training(make(), loss, optax.sgd(0.1), batch, mesh="data=4 tensor=2", rules=rules, dims=dims).placement

    kept = {path: dims for path, dims in names.items() if path != "scale"}
    assert made("infer").dims == made(kept).dims
    if make is Regularized:
        assert made("infer").params["scale"].spec.dims == ("own",)
        return
    with pytest.raises(ShardingError, match="nothing in the model has the dim"):
        made(None)


def test_names_cannot_be_inferred_for_local_shards_or_from_another_word():
    def made(**more):
        return training(
            Variables, lambda model, batch: model(batch["x"]).mean(), optax.sgd(0.1), {"x": jnp.ones((8, 8))},
            mesh="data=8", rules="megatron", **more,
        )  # fmt: skip

    with pytest.raises(ConfigError, match=r"dims='infer'\n    a loss for local shards .*\n    manual=False"):
        made(dims="infer", manual=True)
    with pytest.raises(ConfigError, match=r"dims\n    is 'inferred', and each array has names of its own"):
        made(dims="inferred")


@pytest.mark.parametrize("name", ["llama", "lm1b_linen"])
def test_inferred_names_are_those_that_the_author_declares(name):
    zoo, found = inferred(name)
    declared = declared_dims(boxed(zoo)) | {path: names for path, names in zoo.dims.items() if "*" not in path}
    compared = [path for path in declared if path in found and "LayerNorm" not in path]
    assert len(compared) >= 8
    for path in compared:
        expected = tuple(SAME.get(dim or "unnamed", dim) for dim in declared[path])
        pairs = [(a, b) for a, b in zip(found[path], expected, strict=True) if "mlp" in (a, b)]
        assert all(a == b for a, b in pairs), path


def test_dims_that_are_split_into_parts_are_not_sharded():
    """GPT-2's product for queries, keys and values together: a shard of it would not be a part of each."""
    _, found = inferred("gpt2")
    assert found["h.0.attn.c_attn.kernel"] == ("embed", "unnamed")
    assert found["h.0.mlp.c_fc.kernel"] == ("embed", "mlp")


def sent(dims, batch, loss, init):
    adopted = training(
        init, loss, optax.sgd(0.1), batch, mesh=MeshLayout(data=2, tensor=2).build(jax.devices()[:4]),
        rules=AxisRules(preset="megatron", unnamed=()), dims=dims,
    )  # fmt: skip
    return traffic(traced_collectives(jax.make_jaxpr(adopted.step)(adopted.placement.structs, adopted.batch)))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.relu(nn.Dense(32)(nn.LayerNorm()(x)))
        return x + nn.Dense(8)(hidden)


def test_a_model_without_names_sends_what_megatron_would():
    model, x = Block(), jnp.ones((4, 6, 8))

    def init(key):
        return model.init(key, x)["params"]

    def loss(params, batch, key):
        return jnp.square(model.apply({"params": params}, batch["x"])).mean()

    dims = infer_dims(jax.eval_shape(init, jax.random.key(0)), loss, {"x": x})
    assert dims["Dense_0.kernel"] == ("unnamed", "mlp")
    assert dims["Dense_1.kernel"] == ("mlp", "unnamed")
    found = sent(dims, {"x": x}, loss, init)
    activation = 2 * 6 * 8 * 4  # two rows a device
    all_reduces = 2  # of the block's result, and backward of its input, which the norm's parameters need
    assert found["tensor",] == all_reduces * activation + 4  # and the norm of the gradients


def test_a_loss_without_a_pair_of_products_is_refused():
    with pytest.raises(ConfigError, match="no product of the loss grows a dim"):
        infer_dims(
            {"w": jnp.ones((4, 4))},
            lambda params, batch, key: (batch["x"] @ params["w"]).mean(),
            {"x": jnp.ones((2, 4))},
        )


def test_planted_an_observer_that_joins_nothing_is_seen(monkeypatch):
    monkeypatch.setattr(_Observed, "operation", lambda self, eqn, signature, layouts: None)
    with pytest.raises(ConfigError, match="no product"):
        inferred("llama")
