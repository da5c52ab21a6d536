"""Placements of arrays on a mesh, and the errors of arrays that do not fit."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar.errors import ShardingError
from meshpar.mesh.layout import MeshLayout
from meshpar.parallel.context import ParallelContext, constrain, tracing
from meshpar.sharding.resolve import resolve, with_largest
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec


def spec(shape, *dims):
    return ArraySpec(shape, np.dtype("float32"), dims)


RULES = AxisRules(preset=("fsdp", "megatron"))


@given(
    st.permutations(["embed", "mlp", "layers", "head_dim"]),
    st.lists(st.sampled_from([4, 8, 12]), min_size=4, max_size=4),
    st.sampled_from([{"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "tensor": 4}]),
)
def test_the_local_shape_is_jaxs_shard_shape(dims, shape, sizes):
    mesh = MeshLayout(**sizes).build()
    placement = resolve({"w": spec(tuple(shape), *dims)}, RULES, mesh)["w"]
    assert placement.local_shape == placement.sharding.shard_shape(tuple(shape))
    assert placement.struct.sharding.mesh == mesh


def test_gathering_removes_the_storage_axes_alone():
    placement = resolve({"w": spec((8, 8), "embed", "mlp")}, RULES, MeshLayout(fsdp=4, tensor=2).abstract())["w"]
    assert placement.gathered(RULES).local_shape == (8, 4)


def test_axes_of_size_one_appear_nowhere():
    placement = resolve({"w": spec((8, 8), "embed", "mlp")}, RULES, MeshLayout(fsdp=8).abstract())["w"]
    assert placement.axes == (("fsdp",), ())


def test_one_axis_cannot_shard_two_dims_of_an_array():
    with pytest.raises(ShardingError, match="mlp and heads are both sharded over tensor"):
        resolve({"w": spec((8, 8), "mlp", "heads")}, RULES, MeshLayout(fsdp=4, tensor=2).abstract())


def test_a_repeated_name_cannot_be_sharded():
    """JAX would raise when it makes the sharding, because an axis can shard only one dim of an array."""
    rules = AxisRules(preset=("fsdp",), unnamed=("fsdp",))
    mesh = MeshLayout(fsdp=4).abstract()
    with pytest.raises(ShardingError) as error:
        resolve({"w": spec((8, 8, 4), "unnamed", "unnamed", "mlp"), "b": spec((8,), "unnamed")}, rules, mesh)
    assert (
        str(error.value)
        == """\
1 array does not fit mesh (fsdp=4):
  w  float32[8, 8, 4]  (unnamed, unnamed, mlp)
    2 dims are called unnamed, but only one can be sharded over fsdp
    give them different names by dims=, or rules.unnamed=[] to leave them whole"""
    )


def test_a_repeated_name_is_accepted_if_no_axis_shards_it():
    for rules in (AxisRules(preset="fsdp", unnamed=()), AxisRules(preset="fsdp", unnamed=("tensor",))):
        resolve({"w": spec((8, 8, 8), "unnamed", "unnamed", "embed")}, rules, MeshLayout(fsdp=4).abstract())


@pytest.mark.parametrize(
    ("heads", "mesh", "fix"),
    [
        (8, {"tensor": 3}, "either mesh.tensor=2 or mesh.tensor=4, or rules.heads=[]"),
        (6, {"data": 2, "tensor": 4}, "either mesh.tensor=2 or mesh.tensor=3 or mesh.tensor=6, or rules.heads=[]"),
        (2, {"tensor": 4}, "either mesh.tensor=2, or rules.heads=[]"),
        (7, {"tensor": 2}, "either mesh.tensor=7, or rules.heads=[]"),
        (97, {"tensor": 2}, "either mesh.tensor=1, or rules.heads=[]"),
    ],
)
def test_proposed_sizes_divide_the_dim(heads, mesh, fix):
    with pytest.raises(ShardingError) as error:
        resolve({"w": spec((heads,), "heads")}, AxisRules(preset="megatron"), MeshLayout(**mesh).abstract())
    assert fix in str(error.value)


def test_no_rules_at_all_are_one_problem():
    with pytest.raises(ShardingError, match=r"(?s)^there are no rules:.*rules=replicated, or another preset$"):
        resolve({"w": spec((8,), "embed"), "v": spec((8,), "mlp")}, AxisRules(), MeshLayout().abstract())


def test_constrain_pins_under_gspmd_and_raises_where_jax_would_replicate():
    mesh = MeshLayout(fsdp=4, tensor=2).build()

    def f(x):
        with tracing(ParallelContext(mesh=mesh, rules=RULES)):
            return constrain(x, "batch", "mlp")

    out = jax.jit(f)(np.ones((4, 6), np.float32))
    assert out.sharding.shard_shape(out.shape) == (1, 3)
    with pytest.raises(ShardingError, match="mlp = 5\n    is not divisible by tensor = 2"):
        jax.jit(f)(np.ones((4, 5), np.float32))


# Axes and presets without effect ------------------------------------------------------------------------------------

DENSE = {"up": spec((8, 16), "embed", "mlp"), "down": spec((16, 8), "mlp", "embed")}
PLAIN = {"w": spec((3, 8, 16), "unnamed", "unnamed", "unnamed"), "b": spec((3,), "unnamed")}
IDLE = {
    "stages": (
        "pipeline",
        {"data": 2, "pipe": 4},
        "the dim layers (preset pipeline) or stage (preset pipeline): its 4",
    ),
    "parts of a row": (
        "context",
        {"data": 2, "context": 2},
        "mesh.context = 2\n    nothing in the model has the dim seq",
    ),
    "norms": (
        "megatron_sp",
        {"data": 2, "tensor": 2},
        "rules.residual_seq\n    preset megatron_sp shards it over tensor, and nothing in the model has this dim\n"
        "    rules.residual_seq=[]; or, if activations have it, declare it: activation_dims=[residual_seq]",
    ),
}


@pytest.mark.parametrize("case", IDLE)
def test_a_preset_without_effect_on_a_users_model_is_refused(case):
    preset, sizes, message = IDLE[case]
    rules = AxisRules(preset=preset)
    with pytest.raises(ShardingError) as error:
        resolve(DENSE, rules, MeshLayout(**sizes).abstract(), activation_dims=())
    assert message in str(error.value)
    dims = ("seq", "residual_seq", "stage")
    resolve(DENSE, rules, MeshLayout(**sizes).abstract(), activation_dims=dims)
    resolve(DENSE, rules, MeshLayout(**sizes).abstract())  # meshpar's own models have them all


@pytest.mark.parametrize("preset", ["zero1", "zero2", "fsdp", "hsdp"])
def test_zero_that_stores_nothing_in_shards_is_refused(preset):
    mesh = MeshLayout(fsdp=8).abstract()
    with pytest.raises(ShardingError) as error:
        resolve(PLAIN, AxisRules(preset=preset, unnamed=()), mesh, activation_dims=())
    assert str(error.value).splitlines()[1:] == [
        "  rules.embed",
        f"    preset {preset} stores it in shards over fsdp, and no parameter has this dim",
        "    rules.largest=[fsdp] to shard the largest dim of each parameter without names, or rules=replicated",
    ]
    resolve(PLAIN, AxisRules(preset=preset, unnamed=()), MeshLayout(data=8).abstract(), activation_dims=())


def test_the_largest_dim_that_the_axes_divide_is_sharded():
    mesh = MeshLayout(data=2, fsdp=4).abstract()
    rules = AxisRules(preset="fsdp", largest=("fsdp",))
    arrays = PLAIN | {"odd": spec((8, 99), "unnamed", "unnamed"), "named": spec((8, 16), "embed", "unnamed")}
    placed = resolve(with_largest(arrays, rules, mesh), rules, mesh, activation_dims=())
    assert {name: placement.local_shape for name, placement in placed.items()} == {
        "w": (3, 8, 4), "b": (3,), "odd": (2, 99), "named": (2, 16),
    }  # fmt: skip
    assert placed["w"].reason[2] == "largest -> fsdp   (rules.largest, storage)"
    assert with_largest(arrays, AxisRules(preset="fsdp", unnamed=()), mesh) == arrays


def test_a_rule_for_the_largest_dim_that_shards_nothing_is_refused():
    mesh = MeshLayout(fsdp=4).abstract()
    rules = AxisRules(preset="fsdp", largest=("fsdp",))
    with pytest.raises(ShardingError, match=r"rules.largest\n    no parameter has such a dim"):
        resolve(with_largest(DENSE, rules, mesh), rules, mesh, activation_dims=())
