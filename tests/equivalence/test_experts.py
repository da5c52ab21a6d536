"""Experts that are sharded over an axis: the layer, and whole runs, compute what one device does."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from meshpar.mesh.layout import MeshLayout
from meshpar.nn.describe import describe
from meshpar.nn.experts import Experts, exchange, mixture
from meshpar.nn.experts.layer import MixtureOfExperts
from meshpar.nn.experts.routing import Router
from meshpar.parallel.context import ParallelContext, tracing
from meshpar.parallel.strategies import Parallel
from meshpar.sharding.resolve import resolve
from meshpar.sharding.rules import AxisRules
from meshpar.train.program import WHOLE, on_shards, pspecs
from tests.comparison import largest_difference
from tests.equivalence import conftest as runs
from tests.equivalence.conftest import outcome, prepared

ROWS, SEQ, WIDTH = 24, 4, 6
SOME = "llama_experts_some_layers"
LORA = "llama_experts_lora"
MOE = ("llama_experts", "llama_experts_capacity", SOME, LORA)


def experts_of(num, dispatch, router="softmax"):
    common = {"num": num, "per_token": 2, "intermediate_size": 4, "dispatch": dispatch, "capacity_factor": 1.0}
    if router == "softmax":
        return Experts(**common, balance="loss", z_loss=0.1)
    return Experts(**common, router="sigmoid", groups=2, balance="bias", shared=1, scale=2.0)


@lru_cache
def module(experts):
    return nnx.split(MixtureOfExperts(WIDTH, experts, out_std=0.5, rngs=nnx.Rngs(0)))


def inputs():
    """Rows of the residual stream, and targets of which three in ten do not count."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(ROWS, SEQ, WIDTH)))
    return x, jnp.asarray(np.where(rng.random((ROWS, SEQ)) < 0.3, -1, 1), jnp.int32)


def computed(experts, sizes, presets=("replicated", "experts"), manual=True, exchange="auto"):
    """The result, the sum of the losses, the loads, and the gradients of x and all parameters."""
    layout = MeshLayout(**sizes)
    mesh = layout.build(jax.devices()[: layout.requested()])
    ctx = ParallelContext(mesh=mesh, rules=AxisRules(preset=presets), manual=manual, parallel=Parallel(expert=exchange))
    graph, state = module(experts)
    specs = describe(nnx.merge(graph, state))
    rows = ctx.pspec("batch", "seq")

    def local(state, x, targets):
        y, auxiliary = nnx.merge(graph, state)(x, targets)
        count = (targets >= 0).sum().astype(x.dtype)
        sums = jax.tree.map(lambda value: value * count, {**auxiliary.losses, **auxiliary.metrics})
        return y, lax.psum(sums, ctx.loss_axes) if ctx.manual and ctx.loss_axes else sums

    in_specs = pspecs(resolve(specs, ctx.rules, mesh))
    in_specs = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(in_specs, is_leaf=lambda x: x is None))
    whole = on_shards(local, ctx, (in_specs, rows, rows), (rows, WHOLE))
    x, targets = inputs()

    def weighted(state, x):
        y, sums = whole(state, x, targets)
        losses = sum(value for name, value in sums.items() if name.endswith("loss"))
        return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape).astype(y.dtype))).sum() + losses, (y, sums)

    (_, found), grads = jax.jit(jax.value_and_grad(weighted, (0, 1), has_aux=True))(state, x)
    return found, grads


@lru_cache
def on_one_device(experts):
    return computed(experts, {}, ("replicated",))


def difference(experts, sizes, *settings, **options):
    return largest_difference(computed(experts, sizes, *settings, **options), on_one_device(experts))


@pytest.fixture(autouse=True)
def _float64(float64):
    """Every test here."""


SIZES = [(size, num) for size, num in product((2, 3, 4, 8), (6, 8, 12)) if num % size == 0]
ALL = [*product(SIZES, ("dropless", "capacity"), ("softmax", "sigmoid"))]
SAMPLE = [
    ((3, 6), "dropless", "sigmoid"),
    ((4, 8), "dropless", "softmax"),
    ((3, 6), "capacity", "sigmoid"),
    ((4, 8), "capacity", "softmax"),
]


@pytest.mark.parametrize(
    ("size", "num", "dispatch", "router"),
    [
        pytest.param(size, num, dispatch, router, marks=[] if case in SAMPLE else pytest.mark.slow)
        for case in ALL
        for (size, num), dispatch, router in [case]
    ],
)
def test_experts_on_several_devices_are_those_of_one(size, num, dispatch, router):
    assert difference(experts_of(num, dispatch, router), {"expert": size}) < 1e-10


@pytest.mark.parametrize(
    ("size", "num"), [pytest.param(*case, marks=[] if case == (4, 8) else pytest.mark.slow) for case in SIZES]
)
def test_rows_that_travel_to_their_experts_are_computed_as_on_one_device(size, num):
    """On CPUs too, where each device gathers the tokens of all unless the run says otherwise."""
    assert difference(experts_of(num, "dropless"), {"expert": size}, exchange="ragged") < 1e-10


@pytest.mark.parametrize(
    ("size", "group", "router"),
    [
        (8, 4, "softmax"),
        pytest.param(8, 2, "sigmoid", marks=pytest.mark.slow),
        pytest.param(4, 2, "softmax", marks=pytest.mark.slow),
    ],
)
def test_tokens_that_travel_once_to_each_group_are_computed_as_on_one_device(size, group, router):
    exchange = {"kind": "hierarchical", "group": group}
    assert difference(experts_of(8, "dropless", router), {"expert": size}, exchange=exchange) < 1e-10


@pytest.mark.parametrize("dispatch", ["dropless", "capacity"])
def test_gspmd_computes_the_same(dispatch):
    experts = experts_of(8, dispatch)
    assert difference(experts, {"expert": 4}, ("replicated", "experts"), False) < 1e-10


def by_function(experts, sizes):
    """The result of `mixture` for global arrays, its losses and metrics, and the gradients of x and all arrays."""
    layout = MeshLayout(**sizes)
    mesh = layout.build(jax.devices()[: layout.requested()])
    ctx = ParallelContext(mesh=mesh, rules=AxisRules(preset=("fsdp", "megatron", "experts")))
    x, targets = inputs()

    def weighted(params, x):
        matrices = (params["experts"][name]["kernel"] for name in ("gate", "up", "down"))
        with tracing(ctx):
            y, auxiliary = mixture(x, params["router"]["weight"], *matrices, experts, targets)
        total = (y * jnp.cos(jnp.arange(y.size).reshape(y.shape).astype(y.dtype))).sum()
        return total + sum(auxiliary.losses.values()), (y, auxiliary)

    params = nnx.to_pure_dict(module(experts)[1])
    return jax.jit(jax.value_and_grad(weighted, (0, 1), has_aux=True))(params, x)


def test_the_function_for_a_users_model_computes_the_same_on_several_devices():
    experts = experts_of(8, "dropless")
    found = jax.tree.leaves(by_function(experts, {"expert": 4, "tensor": 2}))
    expected = jax.tree.leaves(by_function(experts, {}))
    assert max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(found, expected, strict=True)) < 1e-10


# Whole runs ----------------------------------------------------------------------------------------------------

RUNS = {
    "zero3_tensor": (
        {"expert": 2, "fsdp": 2, "tensor": 2},
        ["fsdp", "megatron_sp", "experts"],
        {"num_microbatches": 2},
    ),
    "zero3_tensor_one_pass": ({"expert": 2, "fsdp": 2, "tensor": 2}, ["fsdp", "megatron_sp", "experts"], {}),
    "zero1": ({"expert": 2, "fsdp": 2}, ["zero1", "experts"], {}),
    "zero2": ({"expert": 2, "fsdp": 2}, ["zero2", "experts"], {"num_microbatches": 4}),
    "hsdp": ({"expert": 2, "fsdp": 2, "replica": 2}, ["hsdp", "experts"], {}),
    "tensor": ({"expert": 2, "tensor": 4}, ["megatron", "experts"], {}),
    "1f1b": ({"expert": 2, "pipe": 2, "data": 2}, ["pipeline", "experts"], {"pipeline": "1f1b"}),
    "zb_h1": ({"expert": 2, "pipe": 2, "fsdp": 2}, ["pipeline", "fsdp", "experts"], {"pipeline": "zb_h1"}),
    "1f1b_tensor": (
        {"expert": 2, "pipe": 2, "tensor": 2},
        ["pipeline", "megatron_sp", "experts"],
        {"pipeline": "1f1b"},
    ),
    "context": ({"expert": 2, "context": 2}, ["context", "experts"], {}),
    "context_zero3": ({"expert": 2, "context": 2, "fsdp": 2}, ["context", "fsdp", "experts"], {"num_microbatches": 2}),
    "gspmd": ({"expert": 4, "data": 2}, ["experts"], {"lowering": "auto"}),
    "gspmd_tensor": ({"expert": 2, "fsdp": 2, "tensor": 2}, ["fsdp", "megatron_sp", "experts"], {"lowering": "auto"}),
}
IN_CI = [("zero3_tensor", "llama_experts"), ("zero3_tensor_one_pass", SOME), ("zero3_tensor_one_pass", LORA)]


def is_supported(run, model):
    """Capacity needs whole rows; the load of a step one pass over its tokens; a pipeline equal layers."""
    if model == SOME:
        return not {"num_microbatches", "pipeline"} & {*RUNS[run][2]}
    return not ("capacity" in model and "context" in run)


ALL_RUNS = [(run, model) for run, model in product(RUNS, MOE) if is_supported(run, model)]


@pytest.mark.parametrize(
    ("run", "model"), [pytest.param(*case, marks=[] if case in IN_CI else pytest.mark.slow) for case in ALL_RUNS]
)
def test_a_run_with_experts_is_that_of_one_device(run, model):
    sizes, presets, settings = RUNS[run]
    settings = dict(settings)
    if kind := settings.pop("pipeline", None):
        settings["parallel"] = {"pipeline": {"kind": kind, "num_microbatches": 4}}
    lowering = settings.pop("lowering", "manual")
    rules = AxisRules(preset=tuple(presets))
    run = prepared(
        model, None, lowering, settings.pop("num_microbatches", 1), rules=rules, mesh=MeshLayout(**sizes), **settings
    )
    assert outcome(run).difference(runs.on_one_device(model)) < 1e-10


# Faults that are planted, and seen -----------------------------------------------------------------------------


def test_rows_that_go_to_a_neighbour_are_seen(monkeypatch):
    experts = experts_of(8, "dropless")
    starts = exchange._starts
    monkeypatch.setattr(exchange, "_starts", lambda sizes: jnp.roll(starts(sizes), 1, axis=-1))
    assert difference(experts, {"expert": 4}, exchange="ragged") > 1e-3


def test_devices_that_compute_the_experts_of_a_neighbour_are_seen(monkeypatch):
    index = exchange.Devices.index.fget
    monkeypatch.setattr(exchange.Devices, "index", property(lambda devices: (index(devices) + 1) % devices.size))
    assert difference(experts_of(8, "dropless"), {"expert": 4}, exchange="gather") > 1e-3


def test_a_balance_loss_by_the_load_of_each_device_is_seen(monkeypatch):
    """A mean of means, as without the all-reduce of the load."""
    experts = experts_of(8, "dropless")
    monkeypatch.setattr(Router, "_load", lambda self, choices, counted: choices / choices.sum())
    assert difference(experts, {"expert": 4}) > 1e-5
