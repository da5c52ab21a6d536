"""Shardings that a model declares, on a partitioned program."""

from __future__ import annotations

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from meshpar import AxisRules, MeshLayout, training
from meshpar.partition.program import Use
from meshpar.partition.rules import constraints

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


# JAX's explicit mode ------------------------------------------------------------------------------------------------


def test_a_reshard_is_followed():
    assert ("all-gather", ("tensor",)) in moved_by(lambda y: jax.sharding.reshard(y, P("data", None)))
    whole = moved_by(lambda y: jax.sharding.reshard(jax.sharding.reshard(y, P("data", "tensor")), P()))
    assert {("all-gather", ("tensor",)), ("all-gather", ("data",))} <= {*whole}
    assert ("all-to-all", ("tensor",)) in moved_by(lambda y: jax.sharding.reshard(y, P(("data", "tensor"))))


def test_the_sharding_that_an_operation_declares_is_followed():
    product = moved_by(lambda y: jnp.dot(y, jnp.eye(4), out_sharding=P(("data", "tensor"))))
    assert ("reduce-scatter", ("tensor",)) in product
    assert ("all-gather", ("tensor",)) in moved_by(lambda y: y.at[jnp.arange(16)].get(out_sharding=P("data", None)))
    reshaped = moved_by(lambda y: jax.lax.reshape(y, (8, 2, 4), out_sharding=P("data")))
    assert ("all-gather", ("tensor",)) in reshaped


def test_a_sum_that_is_declared_unreduced_ends_where_it_is_resharded():
    def constrain(y):
        identity = jax.sharding.reshard(jnp.eye(4), P("tensor"))
        product = jnp.dot(y, identity, out_sharding=P("data", None, unreduced={"tensor"}))
        return jax.sharding.reshard(product, P("data", "tensor"))

    assert ("reduce-scatter", ("tensor",)) in moved_by(constrain)


def test_a_type_that_only_follows_from_others_declares_nothing():
    def constrain(y):
        y = jax.sharding.reshard(y, P("data", "tensor"))
        return y * jnp.ones((16, 4), out_sharding=P("data", "tensor"))

    assert all(kind == "all-reduce" for kind, _ in moved_by(constrain))


def test_a_function_of_automatic_axes_is_followed_by_its_declared_sharding():
    kept = moved_by(jax.sharding.auto_axes(lambda y: y * 1.0, out_sharding=P("data", "tensor")))
    assert ("all-gather", ("tensor",)) not in kept
    whole = moved_by(jax.sharding.auto_axes(lambda y: y * 1.0, out_sharding=P("data", None), axes=("data", "tensor")))
    assert ("all-gather", ("tensor",)) in whole


def test_a_mesh_that_the_user_set_does_not_matter():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        assert ("all-gather", ("tensor",)) in moved_by(lambda y: jax.sharding.reshard(y, P("data", None)))


def test_a_planted_label_in_place_of_a_move_changes_the_result(monkeypatch):
    def labelled(scope, eqn, sharding, node):
        axes = tuple(over or () for over in constraints._declared(scope, eqn, sharding))
        placed = scope.settled(node)
        return scope.step(
            lambda x: [x], [Use(placed.register)], [replace(placed.layout, axes=axes)], scope.source(eqn)
        )[0]

    monkeypatch.setattr(constraints, "_settled", labelled)
    with pytest.raises((AssertionError, TypeError)):
        moved_by(lambda y: jnp.dot(jax.sharding.reshard(y, P(("data", "tensor"))), jnp.eye(4)))
