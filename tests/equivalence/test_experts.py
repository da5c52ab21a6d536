"""Experts that are sharded over an axis: the layer, and whole runs, compute what one device does."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

from meshpar import training
from meshpar.errors import ConfigError
from meshpar.experiment.config import Precision
from meshpar.mesh.layout import MeshLayout
from meshpar.nn.describe import describe
from meshpar.nn.experts import Experts, exchange, mixture, tiles
from meshpar.nn.experts.functional import DIMS
from meshpar.nn.experts.layer import MixtureOfExperts
from meshpar.nn.experts.routing import Router
from meshpar.parallel.context import ParallelContext, tracing
from meshpar.parallel.precision import wide
from meshpar.parallel.strategies import Parallel
from meshpar.sharding.resolve import resolve
from meshpar.sharding.rules import AxisRules
from meshpar.train.program import WHOLE, on_shards, pspecs
from tests.comparison import largest_difference
from tests.equivalence import conftest as runs
from tests.equivalence.conftest import outcome, prepared

ROWS, SEQ, WIDTH = 24, 4, 6
HIERARCHICAL = {"kind": "hierarchical", "group": 2}
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


def computed(
    experts, sizes, presets=("replicated", "experts"), manual=True, exchange="auto", dtype=jnp.float64, rounded=False
):
    """The result, the sum of the losses, the loads, and the gradients of x and all parameters.

    Args:
      dtype: in which it computes.
      rounded: whether x and the parameters are rounded to bfloat16 before.
    """
    layout = MeshLayout(**sizes)
    mesh = layout.build(jax.devices()[: layout.requested()])
    ctx = ParallelContext(mesh=mesh, rules=AxisRules(preset=presets), manual=manual, parallel=Parallel(expert=exchange))
    graph, state = module(experts)
    specs = describe(nnx.merge(graph, state))
    rows = ctx.pspec("batch", "seq")

    def local(state, x, targets):
        y, auxiliary = nnx.merge(graph, state)(x, targets)
        count = (targets >= 0).sum()
        sums = jax.tree.map(lambda value: value * count.astype(value.dtype), {**auxiliary.losses, **auxiliary.metrics})
        return y, lax.psum(sums, ctx.loss_axes) if ctx.manual and ctx.loss_axes else sums

    in_specs = pspecs(resolve(specs, ctx.rules, mesh))
    in_specs = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(in_specs, is_leaf=lambda x: x is None))
    whole = on_shards(local, ctx, (in_specs, rows, rows), (rows, WHOLE))
    x, targets = inputs()
    if rounded:
        x, state = jax.tree.map(lambda array: array.astype(jnp.bfloat16).astype(dtype), (x, state))

    def weighted(state, x):
        y, sums = whole(state, x, targets)
        losses = sum(wide(value) for name, value in sums.items() if name.endswith("loss"))
        return wide(y * jnp.cos(jnp.arange(y.size).reshape(y.shape).astype(y.dtype))).sum() + losses, (y, sums)

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


ARRAYS = {"router": (WIDTH, 8), "gate": (8, WIDTH, 4), "up": (8, WIDTH, 4), "down": (8, 4, WIDTH)}


def of_a_user(sizes, presets, expert=None, dispatch="dropless", **more):
    """A training whose loss calls `mixture`, and a batch of it."""
    experts = experts_of(8, dispatch)

    def loss(params, batch, key):
        y, auxiliary = mixture(batch["x"], *(params[name] for name in ARRAYS), experts)
        return jnp.square(y - batch["y"]).mean() + sum(auxiliary.losses.values())

    def init(key):
        keys = jax.random.split(key, len(ARRAYS))
        return {name: jax.random.normal(k, ARRAYS[name], float) for name, k in zip(ARRAYS, keys, strict=True)}

    layout = MeshLayout(**sizes)
    batch = {name: np.asarray(jax.random.normal(jax.random.key(i), (ROWS, SEQ, WIDTH))) for i, name in enumerate("xy")}
    mesh = layout.build(jax.devices()[: layout.requested()])
    made = training(
        init, loss, optax.sgd(0.1), batch, mesh=mesh, rules={"preset": presets}, compute_dtype=float,
        accum_dtype=float, dims=dict(zip(ARRAYS, DIMS, strict=True)), parallel=Parallel(expert=expert), **more,
    )  # fmt: skip
    return made, batch


def steps_of_a_user(*arguments):
    made, batch = of_a_user(*arguments)
    step, state, losses = made.compile_step(), made.compile_init()(), []
    for _ in range(2):
        state, metrics = step(state, made.put(batch))
        losses.append(np.asarray(metrics["loss"]))
    return [*losses, *jax.tree.leaves(jax.device_get(state.params))]


def difference_of_a_user(*arguments):
    pairs = zip(steps_of_a_user(*arguments), steps_of_a_user({}, ["replicated"]), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


@pytest.mark.parametrize(
    ("expert", "sizes"),
    [
        ("ragged", {"expert": 4}),
        pytest.param("gather", {"expert": 4, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param(HIERARCHICAL, {"expert": 4, "fsdp": 2}, marks=pytest.mark.slow),
    ],
)
def test_tokens_of_a_users_model_travel_as_parallel_expert_says(expert, sizes):
    assert difference_of_a_user(sizes, ["fsdp", "experts"], expert) < 1e-10


@pytest.mark.slow
def test_control_tokens_of_a_users_model_at_a_wrong_place_are_found(monkeypatch):
    starts = exchange._starts
    monkeypatch.setattr(exchange, "_starts", lambda sizes: jnp.roll(starts(sizes), 1, axis=-1))
    assert difference_of_a_user({"expert": 4}, ["experts"], "ragged") > 1e-6


NOT_EXCHANGED = {
    "with places": (("gather", "capacity"), {}, "parallel.expert has no effect: no experts of this loss exchange all"),
    "unequal groups": (({"kind": "hierarchical", "group": 3},), {}, "cannot be divided into groups of 3"),
    "under GSPMD": (("gather",), {"lowering": "auto"}, "GSPMD chooses how tokens reach their experts"),
    "on shards": (("gather",), {"manual": True}, "a loss for local shards communicates by itself"),
}


@pytest.mark.parametrize("case", NOT_EXCHANGED)
def test_an_exchange_that_experts_of_a_user_do_not_have_is_refused(case):
    how, more, message = NOT_EXCHANGED[case]
    with pytest.raises(ConfigError, match=message):
        of_a_user({"expert": 4}, ["experts"], *how, **more)


UNIT = 2.0**-8
"""The largest relative error of a number that is rounded to bfloat16."""


def bound_in_bfloat16(experts):
    """The bound on the error of each element of the result: to first order, with the errors of all steps."""
    x = np.asarray(inputs()[0].astype(jnp.bfloat16), np.float64).reshape(-1, WIDTH)
    params = nnx.to_pure_dict(jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float64), module(experts)[1]))
    gate, up, down = (np.asarray(params["experts"][name]["kernel"]) for name in ("gate", "up", "down"))
    weights, ids = lax.top_k(jax.nn.softmax(x @ params["router"]["weight"]), experts.per_token)
    weights /= weights.sum(-1, keepdims=True)
    of_expert = np.einsum("tk,tke->te", weights, jax.nn.one_hot(ids, experts.num))
    gate_TEM, up_TEM = (np.abs(np.einsum("td,edm->tem", x, w)) for w in (gate, up))
    # The derivative of silu is at most 1.1. Both factors are rounded, and three operations on them.
    hidden_error = UNIT * (1.1 + 1 + 3) * gate_TEM * up_TEM
    down_error = np.einsum("tem,emd->ted", hidden_error, np.abs(down))
    size = np.einsum("tem,emd->ted", gate_TEM * up_TEM, np.abs(down))
    # The result of an expert is rounded, its weight, their product, the sum of two, and those of up to four devices.
    return np.einsum("te,ted->td", of_expert, down_error + UNIT * (1 + 1 + 1 + 1 + 3) * size).reshape(ROWS, SEQ, WIDTH)


def over_the_bound(exchange="gather"):
    experts = experts_of(8, "dropless")
    (found, _), _ = computed(experts, {"expert": 4}, exchange=exchange, rounded=True, dtype=jnp.bfloat16)
    (exact, _), _ = computed(experts, {}, ("replicated",), rounded=True)
    return float((np.abs(np.asarray(found, np.float64) - exact) / bound_in_bfloat16(experts)).max())


@pytest.mark.parametrize(
    "exchange",
    [pytest.param("gather", marks=pytest.mark.slow), "ragged", pytest.param(HIERARCHICAL, marks=pytest.mark.slow)],
)
def test_a_layer_in_bfloat16_is_within_the_bound_of_rounding_and_near_it(exchange):
    assert 0.05 < over_the_bound(exchange) < 1


@pytest.mark.slow
def test_a_hidden_layer_in_8_bits_is_beyond_the_bound_of_rounding(monkeypatch):
    """Control."""
    product = tiles.silu_product
    monkeypatch.setattr(tiles, "silu_product", lambda *of: product(*of).astype(jnp.float8_e4m3fn).astype(of[0].dtype))
    assert over_the_bound() > 1


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
    "ragged": ({"expert": 2, "fsdp": 2, "tensor": 2}, ["fsdp", "megatron_sp", "experts"], {"exchange": "ragged"}),
    "hierarchical": ({"expert": 4, "fsdp": 2}, ["fsdp", "experts"], {"exchange": HIERARCHICAL}),
    "hierarchical_1f1b": (
        {"expert": 4, "pipe": 2},
        ["pipeline", "experts"],
        {"exchange": HIERARCHICAL, "pipeline": "1f1b"},
    ),
    "gspmd": ({"expert": 4, "data": 2}, ["experts"], {"lowering": "auto"}),
    "gspmd_tensor": ({"expert": 2, "fsdp": 2, "tensor": 2}, ["fsdp", "megatron_sp", "experts"], {"lowering": "auto"}),
}
IN_CI = [
    ("zero3_tensor", "llama_experts"),
    ("hierarchical", "llama_experts"),
    ("zero3_tensor_one_pass", SOME),
    ("zero3_tensor_one_pass", LORA),
]


def is_supported(run, model):
    """Capacity needs whole rows, and has one exchange; the load of a step needs one pass over its tokens; a pipeline
    equal layers.
    """
    if model == SOME:
        return not {"num_microbatches", "pipeline"} & {*RUNS[run][2]}
    return not ("capacity" in model and ("context" in run or "exchange" in RUNS[run][2]))


ALL_RUNS = [(run, model) for run, model in product(RUNS, MOE) if is_supported(run, model)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("run", "model"), [pytest.param(*case, marks=[] if case in IN_CI else pytest.mark.slow) for case in ALL_RUNS]
)
def test_a_run_with_experts_is_that_of_one_device(run, model):
    assert outcome(prepared_run(run, model)).difference(runs.on_one_device(model)) < 1e-10


def prepared_run(name, model, **settings):
    sizes, presets, more = RUNS[name]
    parallel = {}
    if kind := more.get("pipeline"):
        parallel["pipeline"] = {"kind": kind, "num_microbatches": 4}
    if exchange := more.get("exchange"):
        parallel["expert"] = exchange
    rules = AxisRules(preset=tuple(presets))
    lowering = more.get("lowering", "manual")
    num_microbatches = more.get("num_microbatches", 1)
    mesh = MeshLayout(**sizes)
    return prepared(model, None, lowering, num_microbatches, rules=rules, mesh=mesh, parallel=parallel, **settings)


ROUNDED = {"params": "bfloat16", "compute": "float64", "gradients": "float64"}
WITH_MASTER = Precision(**ROUNDED, master="float64")


@lru_cache
def rounded_on_one_device(precision):
    return outcome(prepared("llama_experts", None, "auto", 1, precision=precision))


@pytest.mark.slow
@pytest.mark.parametrize("run", ["zero3_tensor", "zero1", "zero2", "1f1b_tensor", "context_zero3", "hierarchical"])
def test_bfloat16_parameters_of_a_master_copy_are_those_of_one_device(run):
    """Bit for bit: the copies differ by less than 1e-10, and round to the same numbers."""
    found = outcome(prepared_run(run, "llama_experts", precision=WITH_MASTER))
    expected = rounded_on_one_device(WITH_MASTER)
    assert found.difference(expected) < 1e-10
    assert {x.dtype for x in jax.tree.leaves(found.params)} == {jnp.dtype("bfloat16"), jnp.dtype("float32")}
    assert largest_difference(found.params, expected.params) == 0


@pytest.mark.slow
def test_bfloat16_parameters_without_a_master_copy_are_others():
    """Control: their updates are rounded in each step."""
    alone = rounded_on_one_device(Precision(**ROUNDED))
    assert alone.difference(rounded_on_one_device(WITH_MASTER)) > 1e-4


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
