"""The errors of `meshpar.training` for a batch, a loss or an argument that does not fit."""

from __future__ import annotations

import re
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from meshpar import (
    AxisRules,
    ConfigError,
    DataError,
    LocalUpdates,
    LossSums,
    MeshLayout,
    OneFOneB,
    Parallel,
    Reduce,
    ShardingError,
    Synthetic,
    TensorParallel,
    inspect,
    training,
)
from meshpar.optim import AdamW

ROWS = {"x": np.ones((16, 4), "f"), "y": np.ones(16, "f")}
RULES = AxisRules(preset="replicated", unnamed=())


@pytest.fixture(autouse=True, scope="module")
def _promotion():
    """Users' own code runs under JAX's usual promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def rows_loss(params, batch):
    return jnp.square(batch["x"] @ params["w"] - batch["y"])


def mean_loss(params, batch, key):
    return rows_loss(params, batch).mean()


def made(batch=ROWS, loss=mean_loss, tx=None, init=lambda key: {"w": jnp.ones(4)}, rules=RULES, **more):
    more = {"mesh": MeshLayout(data=8)} | more
    return training(init, loss, tx or optax.sgd(0.1), batch, rules=rules, **more)


def traced(**more):
    """Builds a training and traces its step."""
    new = made(**more)
    return jax.eval_shape(new.step, new.placement.structs, new.batch)


class Tensor:
    """A stand-in for PyTorch's tensor, without the import."""

    shape = (16, 4)
    dtype = "torch.float32"


Tensor.__module__ = "torch"

BATCHES = {
    "a scalar": (
        {"t": np.float32(3)},
        "batch['t']\n    is a scalar, and each array of a batch has a first dim of rows",
    ),
    "a number": ({"t": 3.0}, "batch['t']\n    is a float, not an array\n    numpy.asarray(x)"),
    "a tensor": ({"t": Tensor()}, "batch['t']\n    is a tensor of torch, and JAX reads NumPy's arrays\n    x.numpy()"),
    "fewer rows": ({"t": np.ones((8, 2))}, "different numbers of rows: x has 16, y has 16, t has 8\n    the same rows"),
    "no rows": ({"x": ROWS["x"][:0], "y": ROWS["y"][:0]}, "0 rows cannot be cut into 8 equal parts"),
    "texts": ({"t": np.array(["a"] * 16)}, "batch['t']\n    has the dtype <U1, and JAX has arrays of numbers"),
    "a taken name": ({"rows": np.ones(16)}, "batch['rows']\n    a step adds the index of each row under this name"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_an_example_that_is_no_batch_is_refused(case):
    more, message = BATCHES[case]
    with pytest.raises(DataError) as error:
        made(batch=ROWS | more)
    assert str(error.value).startswith("this batch cannot be trained on:\n  batch")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": [1]}, "batch is a list, and no mapping of names to arrays"),
        ({"mesh": 8}, "mesh is 8, and no mesh; pass its sizes, such as 'data=2 tensor=4'"),
        ({"rules": None}, "AxisRules\n    expected a mapping, got None\n    {preset: ..., ...}"),
        ({"tx": optax.sgd}, "and no optimizer; pass optax.adamw(1e-3)"),
    ],
)
def test_an_argument_of_another_kind_is_refused(arguments, message):
    with pytest.raises((ConfigError, DataError), match=re.escape(message)):
        made(**arguments)


WRONG = {
    "lowering": "mnaual", "rounding": "stoch", "number_format": "int4", "num_microbatches": -1, "num_steps": 0,
    "seed": 1.5, "clip_norm": -1.0, "ema": 1.5, "compute_dtype": "int8", "accum_dtype": "bfloat61",
    "params_dtype": int, "master_dtype": "int8", "strict": "no", "offload_optimizer": "no", "parallel": None,
}  # fmt: skip


def test_all_values_that_no_config_accepts_are_refused_at_once():
    with pytest.raises(ConfigError) as error:
        made(**WRONG)
    lines = str(error.value).splitlines()
    assert sorted(line.strip() for line in lines if re.match(r"  \w", line)) == sorted(WRONG)
    assert "    expected 'manual' or 'auto', got 'mnaual'\n    did you mean manual?" in str(error.value)


def test_numbers_of_numpy_and_mappings_of_strategies_are_accepted():
    given = {"num_microbatches": np.int64(2), "clip_norm": np.float32(1), "seed": np.uint32(3)}
    parallel = {"gradient_reduction": {"across": "int8"}}
    assert made(**given, parallel=parallel).ctx == made(**given, parallel=REDUCED).ctx


def test_rows_that_microbatches_do_not_divide_are_refused():
    with pytest.raises(DataError) as error:
        made(num_microbatches=3)
    assert str(error.value).splitlines()[2:] == [
        "    16 rows cannot be cut into 24 equal parts (8 devices x 3 microbatches)",
        "    a multiple of 24 rows",
    ]


PUTS = {
    "a shorter last batch": ({"x": ROWS["x"][:5], "y": ROWS["y"][:5]}, "batch['x']\n    has 5 rows, and the step was"),
    "an array too few": ({"x": ROWS["x"]}, "batch['y']\n    is missing\n    the step was compiled for x, y"),
    "an array too many": (ROWS | {"z": ROWS["x"]}, "batch['z']\n    the step has no such array"),
    "another dtype": (ROWS | {"y": np.ones(16, "i4")}, "is int32[16], and the step was compiled for float32[16]"),
    "another shape": (ROWS | {"y": np.ones((16, 2), "f")}, "is float32[16, 2], and the step was compiled for float32"),
    "a tensor": (ROWS | {"x": Tensor()}, "batch['x']\n    is a tensor of torch"),
}


@pytest.mark.parametrize("case", PUTS)
def test_a_batch_unlike_the_example_is_refused(case):
    batch, message = PUTS[case]
    new = made()
    assert set(new.put(ROWS)) == {"x", "y"}
    with pytest.raises(DataError) as error:
        new.put(batch)
    assert message in str(error.value)


LOSSES = {
    "no scalar": (lambda p, b, key: rows_loss(p, b), "the loss\n    has the shape [16], and has to be one number"),
    "an integer": (lambda p, b, key: jnp.int32(3), "the loss\n    is int32, which has no gradient"),
    "nothing": (
        lambda p, b, key: None,
        "the loss returns (NoneType); return a mean, (mean, metrics), or (mean, metrics",
    ),
    "a vector metric": (
        lambda p, b, key: (mean_loss(p, b, key), {"m": b["x"].mean(0)}),
        "metrics['m']\n    has the shape [4], and has to be one number",
    ),
    "metrics with names of the step's own": (
        lambda p, b, key: (mean_loss(p, b, key), {"loss": b["x"].mean(), "mfu": b["x"].mean()}),
        "metrics['loss']\n    a step records a value of its own under this name\n    another name\n  metrics['mfu']",
    ),
    "a metric without a name": (lambda p, b, key: (mean_loss(p, b, key), b["x"].mean()), "the loss returns (array, ar"),
    "a pmean over devices": (
        lambda p, b, key: jax.lax.pmean(mean_loss(p, b, key), "devices"),
        "the loss communicates over 'devices', an axis name that only pmap, vmap or shard_map binds; the batch has",
    ),
    "an axis of another mesh": (
        lambda p, b, key: jax.lax.with_sharding_constraint(b["x"], P("dp")).mean() * p["w"].sum(),
        "the model is sharded over an axis 'dp', but the mesh has replica, data, ",
    ),
    "an explicit sharding over an axis of another mesh": (
        lambda p, b, key: jnp.einsum("ab,b->a", b["x"], p["w"], out_sharding=P("dp")).mean(),
        "(<lambda>): the model is sharded over an axis 'dp', but the mesh has replica, data, ",
    ),
    "an explicit sharding with an axis twice": (
        lambda p, b, key: jax.sharding.reshard(b["x"], P("tensor", "tensor")).mean() * p["w"].sum(),
        "(<lambda>): a sharding has the axis 'tensor' for two dims; leave one of them whole: None",
    ),
    "an explicit sharding that does not divide": (
        lambda p, b, key: jax.sharding.reshard(b["x"], P(None, "data")).mean() * p["w"].sum(),
        "(<lambda>): a sharding cuts dim 1, of 4, into 8 shards over data; leave it whole, None, or give",
    ),
    "explicit shardings that disagree": (
        lambda p, b, key: (jax.sharding.reshard(b["x"], P("tensor")) * b["x"]).mean() * p["w"].sum(),
        "(<lambda>): in JAX's explicit mode mul got incompatible shardings",
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_cannot_be_trained_on_is_refused(case):
    loss, message = LOSSES[case]
    with pytest.raises(ConfigError) as error:
        traced(loss=loss)
    assert message in str(error.value)


ARGUMENTS = {
    "an unknown keyword": (
        {"microbatches": 2},
        "microbatches\n    training has no such argument\n    did you mean num_m",
    ),
    "one of Training's own": (
        {"specs": {}},
        "specs\n    training has no such argument\n    there are mesh, rules, dims",
    ),
    "a loss without a key": (
        {"loss": lambda params, batch: 0.0},
        "loss\n    is called with 3 arguments\n    def loss(params, batch, key)",
    ),
    "an evaluation without what is carried": (
        {"carried": lambda key: {"n": jnp.ones(())}, "loss": lambda p, b, k, c: 0.0, "evaluation": mean_loss},
        "evaluation\n    is called with 4 arguments\n    def evaluation(params, batch, key, carried)",
    ),
    "a glob": ({"dims": {"v": ("embed",)}}, "dims['v']\n    matches no array\n    the arrays are w"),
    "names": ({"dims": {"w": ("embed", "mlp")}}, "w  float32[4]\n    has 2 names: embed, mlp\n    a name for each dim"),
    "a name for all dims": (
        {"dims": {"w": "embed"}, "batch_dims": {"x": ("batch", ...)}},
        "dims['w']\n    is 'embed', and not a name for each dim\n    a tuple of names, with None for a dim without "
        "one\n  batch_dims['x']\n    is ('batch', Ellipsis), and not a name",
    ),
    "names without an array": (
        {"batch_dims": ("batch", "")},
        "batch_dims\n    is ('batch', ''), and each array has names of its own\n    batch_dims={'x': ('batch', "
        "'embed')}",
    ),
    "an axis": ({"axes": {"tp": "tnsor"}}, "axes: tp\n    tnsor is not an axis of a mesh"),
    "whole variables": (
        {"init": lambda key: {"params": {"w": jnp.ones(4)}, "batch_stats": {"mean": jnp.ones(4)}}},
        "batch_stats.mean\n    is a batch statistic, which the forward changes",
    ),
    "a counter": ({"init": lambda key: {"w": jnp.ones(4), "n": jnp.int32(0)}}, "n\n    is int32[], which has no"),
}


LOCAL = Parallel(local=LocalUpdates(axis="data", every=2))
REDUCED = Parallel(gradient_reduction=Reduce(across="int8"))
STRATEGIES = {
    "a reduction": (
        {"parallel": REDUCED},
        "parallel.gradient_reduction\n    under lowering='auto', XLA reduces gradients as it chooses\n"
        "    lowering='manual', or",
    ),
    "local updates": (
        {"parallel": LOCAL},
        "parallel.local\n    it depends on the number of steps of the whole training",
    ),
    "an overlap": (
        {"parallel": Parallel(tensor=TensorParallel(overlap="ring"))},
        "parallel.tensor.overlap\n    nothing to overlap: the rules do not shard residual_seq",
    ),
    "the ring, written out": (
        {"parallel": Parallel(context="ring")},
        "parallel.context\n    nothing to share: the rules do not shard seq, so each device has whole rows",
    ),
    "an exchange of experts": (
        {"parallel": Parallel(expert="gather")},
        "parallel.expert\n    no tokens travel: the rules do not shard experts over an axis of the batch",
    ),
    "axes across slices": ({"dcn_axes": ("data",)}, "dcn_axes\n    training has no such argument"),
    "64 bits": ({"accum_dtype": jnp.float64}, "accum_dtype\n    JAX would compute in float32, because its 64-bit mode"),
}
"""What a model of the user's own cannot use; see `parallel.checks`."""
WAYS: dict[str, dict[str, Any]] = {"auto": {"lowering": "auto"}, "partitioned": {}, "local": {"manual": True}}


@pytest.mark.parametrize("case", STRATEGIES)
@pytest.mark.parametrize("how", WAYS)
def test_a_strategy_without_effect_is_refused(case, how):
    more, message = STRATEGIES[case]
    if how == "auto" and case == "the ring, written out":
        message = "parallel.context\n    under lowering='auto', GSPMD chooses how devices that share a row attend"
    if how == "local" and case == "an overlap":
        message = "parallel.tensor.overlap\n    a loss for local shards communicates by itself"
    if how != "auto" and case == "a reduction":
        traced(**WAYS[how], **more)
        return
    with pytest.raises(ConfigError) as error:
        made(**WAYS[how], **more)
    assert message in str(error.value)


PIPELINE = {"parallel": Parallel(pipeline=OneFOneB(num_microbatches=2))}
NOT_CUT = {
    "auto": ({"lowering": "auto"}, "parallel.pipeline\n    GSPMD has no pipeline\n    lowering='manual', or"),
    "local": (
        {"manual": True},
        "parallel.pipeline\n    a loss for local shards is not traced with whole shapes, so it cannot be cut into "
        "stages\n    manual=False, or parallel.pipeline=None",
    ),
    "partitioned": ({}, "parallel.pipeline cuts a model between equal layers"),
}


@pytest.mark.parametrize("how", NOT_CUT)
def test_a_pipeline_of_a_model_that_cannot_be_cut_is_refused(how):
    more, message = NOT_CUT[how]
    with pytest.raises((ConfigError, ShardingError)) as error:
        made(**PIPELINE, **more)
    assert message in str(error.value)


OPTIONS = {
    "eight bits by XLA": (
        {"number_format": "int8", "lowering": "auto"},
        "number_format\n    your loss is partitioned by XLA, which knows of no scales\n    lowering='manual', or",
    ),
    "eight bits on shards": (
        {"number_format": "int8", "manual": True},
        "number_format\n    your loss computes its products itself\n    manual=False",
    ),
    "LoRA on shards": ({"lora": {"paths": ["w"]}, "manual": True}, "lora\n    a loss for local shards gets its shards"),
    "LoRA without a kernel": (
        {"lora": {"paths": ["w"]}},
        "lora.paths\n    'w' matches no parameter that is multiplied as a matrix",
    ),
    "an unknown key of LoRA": ({"lora": {"rnk": 2}}, "lora.rnk\n    unknown key\n    did you mean lora.rank?"),
    "an unknown pruning": (
        {"prune": {"kind": "n_off_m"}},
        "prune\n    no kind is called 'n_off_m'\n    did you mean n_of_m?",
    ),
    "a path to freeze": ({"freeze": "v"}, "freeze.0.paths\n    no parameter matches 'v'"),
    "all frozen": ({"freeze": "w"}, "freeze\n    every parameter is frozen for the whole run"),
    "a thaw without steps": (
        {"freeze": {"paths": "w", "until": 2}},
        "freeze.until\n    it depends on the number of steps of the whole training\n    pass num_steps=",
    ),
    "an average of slices": (
        {"parallel": LOCAL, "num_steps": 2, "ema": 0.9},
        "ema\n    a slice would average its own parameters",
    ),
    "rounds that do not end": (
        {"parallel": LOCAL, "num_steps": 3},
        "num_steps\n    3 steps after parallel.local.start = 0 cannot be divided into rounds of 2",
    ),
    "pruning beyond the end": (
        {"prune": {"kind": "magnitude", "sparsity": 0.5, "paths": ["w"]}, "num_steps": 3},
        "prune\n    the last pruning is after step 1000, and num_steps = 3",
    ),
    "pruning slices": (
        {"prune": {"kind": "magnitude", "sparsity": 0.5, "paths": ["w"], "every": 1, "times": 1}, "parallel": LOCAL,
         "num_steps": 2},
        "prune\n    slices would prune different weights",
    ),
    "stochastic float32": (
        {"rounding": "stochastic"},
        "rounding\n    stochastic is for params_dtype=bfloat16",
    ),
    "two ways to clip": (
        {"tx": AdamW(lr=0.1), "clip_norm": 1.0, "num_steps": 2},
        "clip_norm\n    AdamW has a clip_norm of its own",
    ),
}  # fmt: skip
"""Options of `training` that do not fit each other."""


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_do_not_fit_are_refused(case):
    more, message = OPTIONS[case]
    with pytest.raises(ConfigError) as error:
        made(**more)
    assert message in str(error.value)


def test_eight_bits_without_a_product_are_refused():
    with pytest.raises(ConfigError, match="int8: no product of the loss has an activation and a parameter"):
        traced(number_format="int8")


def test_all_strategies_without_effect_are_refused_at_once():
    parallel = REDUCED.model_copy(update={"pipeline": OneFOneB(num_microbatches=4), "local": LOCAL.local})
    with pytest.raises(ConfigError) as error:
        made(parallel=parallel, lowering="auto", num_steps=2)
    assert [line for line in str(error.value).splitlines() if line.startswith("  parallel")] == [
        "  parallel.pipeline", "  parallel.gradient_reduction", "  parallel.local",
    ]  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_that_do_not_fit_are_refused(case):
    more, message = ARGUMENTS[case]
    with pytest.raises(ConfigError) as error:
        made(**more)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"X": ("batch", "")}, "batch_dims['X']\n    the batch has no such array\n    did you mean x?"),
        ({"x": ("batch",)}, "batch_dims['x']\n    1 names for float32[16, 4]\n    a name for each dim"),
        ({"x": ("batch", "height")}, "batch_dims['x']: height = 4\n    no rule covers it\n    rules.height=[] to l"),
    ],
)
def test_names_of_the_batch_that_do_not_fit_are_refused(names, message):
    with pytest.raises(DataError) as error:
        made(batch_dims=names)
    assert message in str(error.value)


def test_a_dim_of_the_batch_without_a_name_may_be_called_none():
    assert made(batch_dims={"x": ("batch", None)}).batch_specs["x"].dims == ("batch", "")


def test_a_rule_for_an_unknown_dim_is_refused_unless_the_dim_is_declared():
    rules = RULES | AxisRules(height=())
    with pytest.raises(ShardingError, match=r"if only activations have it, declare it: activation_dims=\[height\]"):
        _ = made(rules=rules).placement
    _ = made(rules=rules, activation_dims=["height"]).placement
    _ = made(rules=rules, batch_dims={"x": ("batch", "height")}).placement


def test_a_model_without_names_is_sharded_by_its_largest_dims():
    wide = {"w": jnp.ones((4, 16)), "b": jnp.ones(3)}
    loss = lambda p, b, key: jnp.square(b["x"] @ p["w"]).mean() + p["b"].sum()
    arguments = {"init": lambda key: wide, "loss": loss, "mesh": MeshLayout(fsdp=8)}
    with pytest.raises(
        ShardingError, match=r"unnamed\n    rules.largest=\[fsdp\] to shard the largest dim of each param"
    ):
        made(rules=AxisRules(preset="fsdp"), **arguments)
    new = made(rules=AxisRules(preset="fsdp", largest=("fsdp",)), **arguments)
    assert {name: x.sharding.spec for name, x in new.placement.structs.params.items()} == {
        "w": P(None, "fsdp"),
        "b": P(None),
    }
    step = new.compile_step()
    one = made(mesh=MeshLayout(data=1).build(jax.devices()[:1]), init=lambda key: wide, loss=loss)
    got, expected = (float(t.compile_step()(t.compile_init()(), t.put(ROWS))[1]["loss"]) for t in (new, one))
    assert got == pytest.approx(expected, rel=1e-6)
    assert inspect(step.compiled, new.mesh).bytes_per_axis["fsdp"] > 0


# Masks --------------------------------------------------------------------------------------------------------------

MASK = ROWS | {"mask": np.arange(16, dtype="f") / 16}


def masked_mean(params, batch, key):
    return (rows_loss(params, batch) * batch["mask"]).sum() / batch["mask"].sum()


def masked_sums(params, batch, key):
    return LossSums((rows_loss(params, batch) * batch["mask"]).sum(), batch["mask"].sum())


def loss_of(loss, num_microbatches):
    new = made(batch=MASK, loss=loss, num_microbatches=num_microbatches)
    batch = MASK | {"y": np.arange(16, dtype="f")}
    return float(new.compile_step()(new.compile_init()(), new.put(batch))[1]["loss"])


def test_a_sum_and_its_weight_do_not_depend_on_microbatches():
    """The weights of a microbatch may sum to less than 1."""
    assert loss_of(masked_sums, 2) == pytest.approx(loss_of(masked_mean, 1), rel=1e-6)


def test_a_masked_mean_in_microbatches_is_another_number_and_warned_of():
    with pytest.warns(
        UserWarning, match=r"the batch has mask: .* return meshpar.LossSums\(sum, count\), which is exact"
    ):
        assert abs(loss_of(masked_mean, 2) - loss_of(masked_mean, 1)) > 0.1


def test_a_mean_without_a_mask_is_not_warned_of():
    with warnings.catch_warnings(action="error"):
        traced(num_microbatches=2)
        traced(batch=MASK, loss=masked_mean)


# NNX state that the forward changes ---------------------------------------------------------------------------------


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.up(x)).mean()


GRAPH, _, STATE = nnx.split(Normed(nnx.Rngs(0)), nnx.Param, ...)


def state(*filters):
    return lambda key: nnx.state(Normed(nnx.Rngs(key)), *filters)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"init": state(), "loss": mean_loss}, "norm.mean\n    is BatchStat of NNX, which the forward changes"),
        ({"loss": lambda p, b, k: nnx.merge(GRAPH, p)(b["x"])}, "merges only the parameters; pass carried=lambda"),
        (
            {"loss": lambda p, b, k: nnx.merge(GRAPH, p, STATE)(b["x"])},
            "state that was created outside of it, so ",
        ),
        (
            {"loss": lambda p, b, k, c: nnx.merge(GRAPH, p, c)(b["x"]), "carried": state(nnx.BatchStat)},
            "the loss gets norm as carried state, and does not return its new value; return (mean, metrics, carried)",
        ),
    ],
)
def test_state_that_would_be_lost_is_refused(more, message):
    with pytest.raises(ConfigError) as error:
        traced(**{"init": state(nnx.Param)} | more)
    assert message in str(error.value)


@pytest.mark.parametrize("kind", [nnx.BatchStat, nnx.Cache])
def test_state_that_is_returned_is_carried(kind):
    """Also if the model has no state of this kind."""

    def loss(params, batch, key, carried):
        model = nnx.merge(GRAPH, params, carried or zeros())
        return model(batch["x"]), {}, nnx.state(model, kind)

    traced(init=state(nnx.Param), loss=loss, carried=state(kind))


def zeros():
    return jax.tree.map(jnp.zeros_like, STATE)


def test_carried_state_must_keep_its_names_and_shapes():
    def loss(params, batch, key, carried):
        return mean_loss(params, batch, key), {}, {"sum": jnp.ones(3)}

    with pytest.raises(ConfigError) as error:
        traced(loss=loss, carried=lambda key: {"sum": jnp.ones(2), "n": jnp.ones(())})
    assert "carried.n\n    is not returned" in str(error.value)
    assert "carried.sum\n    is float32[2] before the step and float32[3] after it" in str(error.value)


# Local shards -------------------------------------------------------------------------------------------------------


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        def kernel(*dims):
            return nn.with_logical_partitioning(nn.initializers.ones, dims)

        hidden = nn.Dense(8, use_bias=False, kernel_init=kernel("embed", "mlp"))(x)
        return nn.Dense(1, use_bias=False, kernel_init=kernel("mlp", "out"))(hidden)


class NNXDense(nnx.Module):
    def __init__(self, rngs):
        def linear(width, num_outputs, *dims):
            kernel_init = nnx.with_partitioning(nnx.initializers.ones, dims)
            return nnx.Linear(width, num_outputs, use_bias=False, kernel_init=kernel_init, rngs=rngs)

        self.up = linear(4, 8, "embed", "mlp")
        self.down = linear(8, 1, "mlp", "out")

    def __call__(self, x):
        return self.down(self.up(x))


with nnx.use_eager_sharding(False):
    DENSE = nnx.graphdef(nnx.eval_shape(lambda: NNXDense(nnx.Rngs(0))))
FLAX = {
    "linen": (
        lambda key: Dense().init(key, ROWS["x"])["params"],
        lambda p, b, key: Dense().apply({"params": p}, b["x"]).mean(),
    ),
    "nnx": (
        lambda key: nnx.state(NNXDense(nnx.Rngs(key)), nnx.Param),
        lambda p, b, k: nnx.merge(DENSE, p)(b["x"]).mean(),
    ),
}


@pytest.mark.parametrize("api", FLAX)
@pytest.mark.parametrize(("preset", "axis"), [("fsdp", "fsdp"), ("megatron", "tensor")])
def test_a_model_of_whole_parameters_gets_no_shards(api, preset, axis):
    init, loss = FLAX[api]
    mesh = MeshLayout(data=4, **{axis: 2})
    new = training(init, loss, optax.sgd(0.1), ROWS, mesh=mesh, rules=AxisRules(preset=preset, out=()), manual=True)
    with pytest.raises(ConfigError, match=r"with manual=True (the loss gets a device's|each has its own) shards"):
        jax.eval_shape(new.step, new.placement.structs, new.batch)


def batch_statistic(mean_over):
    def loss(params, batch, key, carried):
        mean = batch["x"].mean(0)
        mean = jax.lax.pmean(mean, mean_over) if mean_over else mean
        error = jnp.square((batch["x"] - mean) @ params["w"]).mean()
        return error, {}, {"batch_stats": {"mean": 0.9 * carried["batch_stats"]["mean"] + 0.1 * mean}}

    return {"loss": loss, "carried": lambda key: {"batch_stats": {"mean": jnp.zeros(4)}}}


@pytest.mark.parametrize("parallel", [Parallel(), REDUCED], ids=["plain", "int8"])
def test_statistics_of_a_devices_rows_are_refused(parallel):
    with pytest.raises(ConfigError) as error:
        traced(manual=True, parallel=parallel, **batch_statistic(mean_over=()))
    assert str(error.value) == (
        "the results of the loss are not those of all devices:\n"
        "  carried.batch_stats.mean\n"
        "    differs from device to device along data: with manual=True each has its own shards\n"
        "    jax.lax.pmean(x, 'data') in the loss, BatchNorm(axis_name='data'), or manual=False"
    )
    traced(manual=True, parallel=parallel, **batch_statistic(mean_over="data"))


def test_carried_nnx_state_goes_with_error_feedback():
    reduction = Reduce(across={"kind": "int8", "error_feedback": True})

    def loss(params, batch, key, carried):
        return nnx.merge(GRAPH, params, jax.tree.map(jnp.copy, carried))(batch["x"]), {}, carried

    parallel = Parallel(gradient_reduction=reduction)
    traced(manual=True, parallel=parallel, init=state(nnx.Param), loss=loss, carried=state(nnx.BatchStat))


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_statistics_of_microbatches_are_warned_of(num_microbatches):
    with warnings.catch_warnings(record=True, action="always") as found:
        traced(num_microbatches=num_microbatches, **batch_statistic(mean_over=()))
    said = [str(one.message) for one in found]
    assert said == [
        "batch_stats.mean is a statistic of the batch: each of 2 microbatches is normalized by its own, so the step "
        "differs from that of the whole batch; num_microbatches=1 is exact"
    ] * (num_microbatches > 1)


def test_rows_in_64_bits_are_stored_in_32_without_jaxs_64_bit_mode():
    wide = {name: x.astype(np.float64) for name, x in ROWS.items()}
    with jax.enable_x64(False):
        new = made(batch=wide)
        assert {name: x.dtype.name for name, x in new.put(wide).items()} == {"x": "float32", "y": "float32"}


# Others -------------------------------------------------------------------------------------------------------------


def test_an_optimizer_that_takes_no_keyword_within_a_chain_is_refused():
    with pytest.raises(ConfigError, match=r"got an unexpected keyword.*works only alone, outside of optax\.chain"):
        traced(tx=optax.chain(optax.clip(1.0), optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1))))


def test_a_config_made_in_python_reports_all_its_problems():
    with pytest.raises(ConfigError) as error:
        Synthetic(vocab_size=2, batchsize=3)
    assert str(error.value) == (
        "2 problems in Synthetic:\n"
        "  vocab_size\n    must be at least 3, got 2\n"
        "  batchsize\n    unknown key\n    did you mean batch_size?"
    )


def test_other_errors_of_flax_are_passed_on():
    def loss(params, batch, key):
        return nn.Dense(3).apply({"params": {}}, batch["x"]).mean()

    with pytest.raises(Exception, match="kernel"):
        traced(loss=loss)
