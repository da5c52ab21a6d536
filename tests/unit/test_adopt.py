"""Linen and NNX models that name their dims are sharded by these names, without a change to the models."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshpar import AxisRules, MeshLayout, ShardingError, inspect, training, verify
from meshpar.tree import flatten_with_paths

MESH = MeshLayout(data=2, fsdp=2, tensor=2)
RULES = AxisRules(preset=("fsdp", "megatron"), unnamed=())
WIDTH = 8
MLP = 16
LAYERS = 2
ROWS = 8


@pytest.fixture(autouse=True, scope="module")
def _promotion():
    """Users' own code runs under JAX's usual promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def named(names):
    return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)


class Layer(nn.Module):
    """A feed-forward layer with logical names, as a Linen user writes it."""

    @nn.compact
    def __call__(self, x, _):
        hidden = nn.gelu(nn.Dense(MLP, use_bias=False, kernel_init=named(("embed", "mlp")))(x))
        hidden = nn.with_logical_constraint(hidden, ("batch", "mlp"))
        return x + nn.Dense(WIDTH, use_bias=False, kernel_init=named(("mlp", "embed")))(hidden), None


class Stack(nn.Module):
    """Layers stacked by `nn.scan`, which adds a name for their dim."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )  # fmt: skip
        x, _ = layers(name="layers")(x, None)
        return nn.LayerNorm()(x)


class MLPLayer(nnx.Module):
    """The same layer in NNX, with annotated kernels."""

    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(WIDTH, MLP, kernel_init=nnx.with_partitioning(init, ("embed", "mlp")), rngs=rngs)
        self.down = nnx.Linear(MLP, WIDTH, kernel_init=nnx.with_partitioning(init, ("mlp", "embed")), rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


def rows(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(ROWS, WIDTH)).astype("f") for name in ("x", "y")}


def linen(rules=RULES, mesh=MESH):
    return training(
        lambda key: Stack().init(key, jnp.ones((1, WIDTH)))["params"],
        lambda params, batch, key: jnp.square(Stack().apply({"params": params}, batch["x"]) - batch["y"]).mean(),
        optax.adamw(1e-3), rows(0), mesh=mesh, rules=rules,
    )  # fmt: skip


def stacked(key):
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(key):
        return MLPLayer(nnx.Rngs(key))

    return make(jax.random.split(key, LAYERS))


def nnx_stack(rules=RULES):
    with nnx.use_eager_sharding(False):
        graph = nnx.graphdef(nnx.eval_shape(lambda: stacked(jax.random.key(0))))

    def loss(params, batch, key):
        def layer(x, params):
            return nnx.merge(graph, params)(x), None

        x, _ = jax.lax.scan(layer, batch["x"], params)
        return jnp.square(x - batch["y"]).mean()

    return training(
        lambda key: nnx.state(stacked(key), nnx.Param), loss, optax.sgd(1e-2), rows(0), mesh=MESH, rules=rules
    )


def dims(adopted):
    return {path: spec.dims for path, spec in flatten_with_paths(adopted.specs).items()}


def test_the_names_of_a_linen_model_include_those_that_scan_adds():
    assert dims(linen()) == {
        "LayerNorm_0.bias": ("unnamed",),
        "LayerNorm_0.scale": ("unnamed",),
        "layers.Dense_0.kernel": ("layers", "embed", "mlp"),
        "layers.Dense_1.kernel": ("layers", "mlp", "embed"),
    }


def test_the_names_of_an_nnx_model_include_those_that_vmap_adds():
    assert dims(nnx_stack()) == {
        "down.bias.value": ("unnamed", "unnamed"),
        "down.kernel.value": ("layers", "mlp", "embed"),
        "up.bias.value": ("unnamed", "unnamed"),
        "up.kernel.value": ("layers", "embed", "mlp"),
    }


@pytest.mark.parametrize("adopt", [linen, nnx_stack])
def test_the_state_is_initialized_sharded(adopt):
    adopted = adopt()
    state = adopted.compile_init()()
    kernel = next(x for path, x in flatten_with_paths(state.params).items() if "kernel" in path)
    assert kernel.sharding.shard_shape(kernel.shape)[0] == LAYERS
    assert kernel.addressable_shards[0].data.size == kernel.size // 4
    moments = [x for path, x in flatten_with_paths(state.opt_state).items() if "kernel" in path]
    assert all(x.sharding.is_equivalent_to(kernel.sharding, 3) for x in moments if x.shape == kernel.shape)


def test_a_name_without_a_rule_is_an_error():
    with pytest.raises(ShardingError) as error:
        _ = linen(AxisRules(embed=("fsdp",), batch=("data",), mlp=("tensor",), layers=())).placement
    assert "LayerNorm_0.bias  float32[8]  (unnamed)\n    no rule covers unnamed\n" in str(error.value)
    assert "rules.unnamed=[] to leave it whole" in str(error.value)


def traced(adopted) -> str:
    return str(jax.make_jaxpr(adopted.step)(adopted.placement.structs, adopted.batch))


def test_flaxs_constraints_follow_the_rules_under_gspmd():
    """An activation is constrained to the sharding of its names; on one device there is no constraint."""
    hidden = "spec=P(('data', 'fsdp'), 'tensor')"
    on_one_device = linen(mesh=MeshLayout().build(jax.devices()[:1]))
    assert hidden in traced(linen().on(manual=False))
    assert hidden not in traced(on_one_device.on(manual=False))


@pytest.mark.sample(1)
@pytest.mark.parametrize("adopt", [linen, nnx_stack])
def test_linen_and_nnx_models_are_verified_as_they_are(adopt):
    proof = verify(adopt(), [rows(1), rows(2)])
    assert proof.is_equal, str(proof)


def test_a_linen_model_is_inspected_as_it_is():
    adopted = linen()
    report = inspect(adopted.compile_step().compiled, adopted.mesh)
    assert {"fsdp", "tensor"} <= {axis for collective in report.collectives for axis in collective.axes or ()}


def test_replicated_needs_no_rule_for_parameters_without_names():
    run = training(
        lambda key: {"w": jnp.ones((4, 2)), "b": jnp.ones(2)},
        lambda params, batch, key: (batch["x"] @ params["w"] + params["b"]).mean(),
        optax.sgd(0.1), {"x": jnp.ones((8, 4))}, mesh={"data": 8}, rules="replicated",
    )  # fmt: skip
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(run.compile_init()().params))
