"""A second training in a process is traced for its own rules, also where JAX caches the trace of a user's function.

JAX caches the traces of `jit`, of the bodies of `scan` and of Flax's transforms by function and shapes, and
`meshpar.constrain` reads the context while it is traced.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from meshpar import AxisRules, MeshLayout, constrain, inspect, training
from meshpar.parallel import context

WIDTH = 8
HIDDEN = 16
LAYERS = 2
MESH = MeshLayout(data=2, tensor=4)
MEGATRON = AxisRules(preset="megatron")
ROWS = AxisRules(batch=("data", "tensor"), mlp=(), embed=("tensor",))
HIDDEN_SPECS = {"megatron": P("data", "tensor"), "rows": P(("data", "tensor"), None)}
"""The sharding of the hidden activation (batch, mlp), as the rules say it."""


def layer(up, down, x):
    return constrain(jnp.tanh(x @ up), "batch", "mlp") @ down


def body(carry, _):
    up, down, x = carry
    return (up, down, layer(up, down, x)), None


def in_scan(up, down, x):
    return jax.lax.scan(body, (up, down, x), length=LAYERS)[0][2]


class Layer(nnx.Module):
    def __init__(self, up, down):
        self.up, self.down = nnx.Param(up), nnx.Param(down)

    def __call__(self, x):
        return layer(self.up[...], self.down[...], x)


@nnx.scan(in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=LAYERS)
def nnx_scanned(model, x):
    return model(x)


nnx_jitted = nnx.jit(Layer.__call__)
nnx_remat = nnx.remat(Layer.__call__)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        up = self.param("up", nn.initializers.ones, (WIDTH, HIDDEN))
        down = self.param("down", nn.initializers.ones, (HIDDEN, WIDTH))
        return layer(up, down, x)


class LinenStep(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return Linen(name="linen")(x), None


LinenJit = nn.jit(Linen)
LinenRemat = nn.remat(Linen)
LinenScan = nn.scan(LinenStep, variable_broadcast="params", split_rngs={"params": False}, length=LAYERS)


def of_nnx(function):
    return lambda up, down, x: function(Layer(up, down), x)


def of_linen(module):
    return lambda up, down, x: module.apply({"params": {"up": up, "down": down}}, x)


def in_linen_scan(up, down, x):
    return LinenScan().apply({"params": {"linen": {"up": up, "down": down}}}, x, None)[0]


TRANSFORMS = {
    "jax.jit": jax.jit(layer),
    "jax.checkpoint": jax.checkpoint(layer),
    "lax.scan": in_scan,
    "lax.cond": lambda up, down, x: jax.lax.cond(True, layer, layer, up, down, x),
    "nnx.jit": of_nnx(nnx_jitted),
    "nnx.remat": of_nnx(nnx_remat),
    "nnx.scan": of_nnx(nnx_scanned),
    "nn.jit": of_linen(LinenJit()),
    "nn.remat": of_linen(LinenRemat()),
    "nn.scan": in_linen_scan,
}


def trained(function, rules):
    def init(key):
        return {"up": jnp.ones((WIDTH, HIDDEN)), "down": jnp.ones((HIDDEN, WIDTH))}

    def loss(params, batch, key):
        return jnp.square(function(params["up"], params["down"], batch["x"])).mean()

    rows = {"x": np.ones((16, WIDTH), np.float32)}
    dims = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
    return training(init, loss, optax.sgd(0.1), rows, mesh=MESH, rules=rules, dims=dims, lowering="auto")


def constraints(function, rules):
    """The specs to which the traced step pins the hidden activation."""
    new = trained(function, rules)
    found = set()

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "sharding_constraint" and equation.outvars[0].aval.shape == (16, HIDDEN):
                found.add(equation.params["sharding"].spec)
            for inner in jaxprs_in_params(equation.params):
                visit(inner)

    visit(jax.make_jaxpr(new.step)(new.placement.structs, new.batch).jaxpr)
    return found


@pytest.fixture(autouse=True, scope="module")
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_second_training_has_its_own_constraints(transform):
    function = TRANSFORMS[transform]
    assert constraints(function, MEGATRON) == {HIDDEN_SPECS["megatron"]}
    assert constraints(function, ROWS) == {HIDDEN_SPECS["rows"]}
    assert constraints(function, MEGATRON) == {HIDDEN_SPECS["megatron"]}


def test_the_second_training_sends_the_bytes_of_a_function_that_was_never_traced():
    def fresh(*arguments):
        return layer(*arguments)

    sent = []
    for function, rules in [(jax.jit(layer), MEGATRON), (TRANSFORMS["jax.jit"], ROWS), (fresh, ROWS)]:
        _ = constraints(TRANSFORMS["jax.jit"], MEGATRON)
        new = trained(function, rules)
        sent.append(inspect(new.compile_step().compiled, new.mesh).bytes_per_axis)
    assert sent[1] == sent[2] != sent[0]


@pytest.mark.parametrize("transform", ["jax.jit", "lax.scan", "nnx.jit"])
def test_control_without_the_context_in_the_keys_of_caches(transform, monkeypatch):
    monkeypatch.setattr(context, "_in_cache_keys", lambda ctx: jax.named_scope("unused"))
    jax.clear_caches()
    assert constraints(TRANSFORMS[transform], MEGATRON) == {HIDDEN_SPECS["megatron"]}
    assert constraints(TRANSFORMS[transform], ROWS) != {HIDDEN_SPECS["rows"]}
    jax.clear_caches()
