"""Shardings that a model declares, on a partitioned program."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from meshpar import AxisRules, MeshLayout, training

X = np.arange(64, dtype="float32").reshape(16, 4) / 64


def moved_by(constrain, *, rules=None, dims=None, **more):
    def loss(params, batch, key):
        return jnp.tanh(constrain(batch["x"] @ params["w"])).mean()

    adopted = training(
        lambda key: {"w": jnp.ones((4, 4))}, loss, optax.sgd(0.1), {"x": X},
        mesh=MeshLayout(data=2, tensor=2).build(jax.devices()[:4]),
        rules=rules or AxisRules(preset="megatron", rows=(), columns=("tensor",)),
        dims=dims or {"w": ("rows", "columns")},
        **more,
    )  # fmt: skip
    _, metrics = adopted.compile_step()(adopted.compile_init()(), adopted.put({"x": X}))
    expected = np.tanh(X @ np.ones((4, 4), "float32")).mean()
    assert abs(float(metrics["loss"]) - expected) < 1e-6
    return [(one.move.kind, one.move.axes) for one in adopted.activations]


def test_a_constraint_by_axes_is_followed():
    whole = moved_by(lambda y: jax.lax.with_sharding_constraint(y, P("data", None)))
    assert ("all-gather", ("tensor",)) in whole
    exchanged = moved_by(lambda y: jax.lax.with_sharding_constraint(y, P(("data", "tensor"), None)))
    assert ("all-to-all", ("tensor",)) in exchanged


def test_a_dim_that_a_constraint_leaves_open_keeps_its_sharding():
    kept = moved_by(lambda y: jax.lax.with_sharding_constraint(y, P("data", P.UNCONSTRAINED)))
    assert all(kind == "all-reduce" for kind, _ in kept)


def test_a_constraint_by_names_follows_the_rules():
    names = nn.with_logical_constraint
    assert ("all-gather", ("tensor",)) in moved_by(lambda y: names(y, ("batch", "rows")))
    assert all(kind == "all-reduce" for kind, _ in moved_by(lambda y: names(y, ("batch", "columns"))))


def test_a_models_own_name_of_an_axis_is_mapped():
    rules = AxisRules(preset="megatron", rows=())
    dims = {"w": ("rows", "tp")}

    def constrain(y):
        return jax.lax.with_sharding_constraint(y, P(("data", "tp"), None))

    assert ("all-to-all", ("tensor",)) in moved_by(constrain, rules=rules, dims=dims, axes={"tp": "tensor"})


def test_a_region_of_the_users_own_computes_on_shards():
    def constrain(y):
        return jax.shard_map(lambda y: y * 1.0, in_specs=P("data", "tensor"), out_specs=P("data", "tensor"))(y)

    assert all(kind == "all-reduce" for kind, _ in moved_by(constrain))
