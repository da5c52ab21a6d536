"""What the partitioner refuses: the message names the line of the user's code, and what to do."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import AxisRules, MeshLayout, training
from meshpar.errors import ConfigError, ShardingError
from tests.partition.functions import context, plan

X = np.ones((8, 4), "float32")
HERE = re.escape(__file__)


def step_of(loss, mesh=None, rules=None, **more):
    mesh = mesh or MeshLayout(data=2)
    adopted = training(
        lambda key: {"w": jnp.ones((4, 4))}, loss, optax.sgd(0.1), {"x": X}, mesh=mesh.build(jax.devices()[:2]),
        rules=rules or AxisRules(preset="replicated", unnamed=()), **more,
    )  # fmt: skip
    return jax.make_jaxpr(adopted.step)(adopted.placement.structs, adopted.batch)


def calls_python(params, batch, key):
    y = batch["x"] @ params["w"]
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(y.shape, y.dtype), y).mean()


def prints(params, batch, key):
    y = batch["x"] @ params["w"]
    jax.debug.print("{}", y.sum())
    return y.mean()


def has_no_rule(params, batch, key):
    y = batch["x"] @ params["w"]
    return jax.scipy.special.betainc(1.0, 1.0, jax.nn.sigmoid(y)).mean()


def pinned(spec):
    def loss(params, batch, key):
        return jax.lax.with_sharding_constraint(batch["x"] @ params["w"], spec).mean()

    return loss


def reads_around(params, batch, key):
    scale = batch["x"].mean()

    @jax.custom_vjp
    def scaled(x):
        return x * scale

    scaled.defvjp(lambda x: (x * scale, None), lambda _, ct: (ct * scale,))
    return scaled(batch["x"] @ params["w"]).mean()


def test_a_derivative_that_reads_an_array_around_it_is_refused_with_its_line():
    with pytest.raises(ShardingError, match=rf"{HERE}:\d+ \(reads_around\): the derivative of a custom_vjp reads") as e:
        step_of(reads_around)
    assert "give it to the function as an argument" in str(e.value)


@pytest.mark.parametrize("loss", [calls_python, prints])
def test_a_callback_is_refused_with_its_line(loss):
    with pytest.raises(ShardingError, match=rf"{HERE}:\d+ \({loss.__name__}\): .*_callback|debug_print") as error:
        step_of(loss)
    assert "outside of the loss" in str(error.value)


def test_an_operation_without_a_rule_is_refused_with_its_line():
    with pytest.raises(ShardingError, match=rf"{HERE}:\d+ \(has_no_rule\): .*'regularized_incomplete_beta'") as error:
        step_of(has_no_rule)
    assert "lowering=auto" in str(error.value)


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        (jax.sharding.PartitionSpec("data", "data"), "a sharding has the axis .data. for two dims; leave one"),
        (jax.sharding.PartitionSpec("rows"), "an axis 'rows', but the mesh has"),
    ],
)
def test_a_constraint_that_does_not_fit_the_mesh_is_refused(spec, what):
    with pytest.raises(Exception, match=what):
        step_of(pinned(spec))


def test_a_constraint_that_does_not_divide_a_dim_is_refused_with_its_line():
    def loss(params, batch, key):
        y = (batch["x"] @ params["w"])[:, :3]
        return jax.lax.with_sharding_constraint(y, jax.sharding.PartitionSpec(None, "tensor")).mean()

    rules = AxisRules(preset=["megatron"], rows=(), columns=("tensor",))
    with pytest.raises(ShardingError, match=rf"{HERE}:\d+ \(.*loss\)\n +a dim of 3 is not divisible by tensor = 2"):
        step_of(loss, MeshLayout(tensor=2), rules, dims={"w": ("rows", "columns")})


def test_storage_before_partition_in_one_dim_is_refused():
    rules = AxisRules(preset="fsdp", wide=("fsdp", "tensor"), rows=())
    adopted = training(
        lambda key: {"w": jnp.ones((4, 8))}, lambda params, batch, key: (batch["x"] @ params["w"]).mean(),
        optax.sgd(0.1), {"x": X}, mesh=MeshLayout(fsdp=2, tensor=2).build(jax.devices()[:4]), rules=rules,
        dims={"w": ("rows", "wide")},
    )  # fmt: skip
    with pytest.raises(ShardingError, match=r"rules.wide=\[tensor, fsdp\]"):
        jax.make_jaxpr(adopted.step)(adopted.placement.structs, adopted.batch)


# strict ------------------------------------------------------------------------------------------------------------


def contrastive(params, batch, key):
    y = batch["x"] @ params["w"]
    return (y @ y.T).mean()


def test_strict_refuses_an_activation_that_nothing_declares():
    step_of(contrastive)
    with pytest.raises(ShardingError, match=rf"{HERE}:\d+ \(contrastive\).*\n?.*all-gather") as error:
        step_of(contrastive, strict=True)
    assert "with_sharding_constraint" in str(error.value)


def test_strict_accepts_what_a_constraint_declares():
    def loss(params, batch, key):
        y = batch["x"] @ params["w"]
        every = jax.lax.with_sharding_constraint(y, jax.sharding.PartitionSpec())
        return (y @ every.T).mean()

    step_of(loss, strict=True)


@pytest.mark.parametrize("more", [{"lowering": "auto"}, {"manual": True}])
def test_strict_without_a_partitioned_loss_is_an_error(more):
    with pytest.raises(ConfigError, match="strict"):
        step_of(contrastive, strict=True, **more)


def test_a_value_that_is_moved_is_listed_with_line_layout_and_bytes():
    adopted = training(
        lambda key: {"w": jnp.ones((4, 4))}, contrastive, optax.sgd(0.1), {"x": X},
        mesh=MeshLayout(data=2).build(jax.devices()[:2]), rules=AxisRules(preset="replicated", unnamed=()),
    )  # fmt: skip
    (moved,) = [one for one in adopted.activations if not one.is_declared]
    assert (moved.move.kind, moved.move.axes, moved.times) == ("all-gather", ("data",), 1)
    assert moved.sent == 4 * 4 * 4  # a device sends its four rows of four float32 to the other
    assert re.fullmatch(rf"{HERE}:\d+ \(contrastive\)", moved.line)


# The cheaper change ------------------------------------------------------------------------------------------------


def kinds(function, arguments, axes):
    program = plan(function, [np.float32(x) for x in arguments], axes, context())
    program.outputs = []
    return [
        (move.kind, move.axes)
        for step in program.steps
        for use in step.ins
        for move in use.moves(program.layouts[use.register], program.sizes)
    ]


def test_operands_that_disagree_are_sliced_before_they_are_exchanged_or_gathered():
    x, y = np.ones((4, 8)), np.ones((4, 8))
    rows, columns, whole = (("data",), ()), ((), ("data",)), ((), ())
    assert kinds(lambda x, y: x * y, (x, y), (rows, whole)) == [("slice", ("data",))]
    assert kinds(lambda x, y: x * y, (x, y), (rows, columns)) == [("all-to-all", ("data",))]
    assert kinds(lambda x, w: x @ w, (x, np.ones((8, 2))), (columns, whole)) == [("slice", ("data",))]


def test_a_sum_ends_in_the_shards_of_what_it_is_multiplied_by():
    x, w, scale = np.ones((4, 8)), np.ones((8, 4)), np.ones((1, 4))
    layouts = ((), ("tensor",)), (("tensor",), ()), ((), ("tensor",))
    assert kinds(lambda x, w, scale: (x @ w) * scale, (x, w, scale), layouts) == [("reduce-scatter", ("tensor",))]
    assert kinds(lambda x, w, scale: (x @ w) * 2.0, (x, w, scale), layouts) == []


def test_the_smaller_of_two_operands_is_gathered():
    large, small = np.ones((4, 64)), np.ones((64, 4))
    found = kinds(lambda a, b: a @ b, (large, small), ((("data",), ()), ((), ("data",))))
    assert found == [("all-gather", ("data",))]
    wide = (np.ones((2, 64), "float32"), np.ones((64, 64), "float32"))
    program = plan(lambda a, b: a @ b, wide, ((("data",), ()), ((), ("data",))), context())
    (out,) = program.steps[0].outs
    assert program.layouts[out].axes == ((), ("data",))
