"""What keeps a model of the user's own from running in the stages of a pipeline: each reason, its line, and a fix."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from meshpar import AxisRules, MeshLayout, training
from meshpar.errors import ConfigError, MeshparError, ScheduleError, ShardingError
from meshpar.parallel.strategies import Parallel

WIDTH = 4
BATCH = {"x": jnp.ones((8, WIDTH)), "y": jnp.ones((8, WIDTH))}
STACKED = {"layers.w": ("layers", "unnamed", "unnamed")}


def init(key):
    return {"layers": {"w": jnp.ones((4, WIDTH, WIDTH))}, "out": jnp.ones((WIDTH, WIDTH))}


def mean(x, batch):
    return jnp.square(x - batch["y"]).mean()


def layer(x, layer):
    return jnp.tanh(x @ layer["w"]), None


def stacked(params, batch, key):
    return mean(jax.lax.scan(layer, batch["x"], params["layers"])[0] @ params["out"], batch)


def alone(params, batch, key):
    return mean(batch["x"] @ params["out"], batch)


def decayed(params, batch, key):
    return stacked(params, batch, key) + 0.1 * jnp.square(params["layers"]["w"]).sum()


def counting(params, batch, key):
    def counted(carry, layer):
        x, i = carry
        return (x + i * jnp.tanh(x @ layer["w"]), i + 1), None

    return mean(jax.lax.scan(counted, (batch["x"], jnp.int32(0)), params["layers"])[0][0], batch)


def mixing(params, batch, key):
    mixed = jnp.einsum("nij,jk->nik", params["layers"]["w"], params["out"])
    layers = (params["layers"], mixed)
    return mean(jax.lax.scan(lambda x, each: (x @ each[0]["w"] @ each[1], None), batch["x"], layers)[0], batch)


def chosen(params, batch, key):
    def layer(x, layer):
        y = jnp.tanh(x @ layer["w"])
        return y, y.argmax()

    x, largest = jax.lax.scan(layer, batch["x"], params["layers"])
    return mean(x, batch), {"largest": largest.max().astype(jnp.float32)}


def of_both_kinds(key):
    return {"layers": {"w": jnp.ones((4, WIDTH, WIDTH))}, "blocks": [{"v": jnp.ones((WIDTH, WIDTH))} for _ in range(4)]}


def scanning_some(params, batch, key):
    listed = jnp.stack([block["v"] for block in params["blocks"]])
    rows = params["layers"]["w"], listed
    return mean(jax.lax.scan(lambda x, row: (jnp.tanh(x @ row[0]) @ row[1], None), batch["x"], rows)[0], batch)


def reading_rows(params, batch, key):
    x = batch["x"]
    for i, block in enumerate(params["blocks"]):
        x = jnp.tanh(x @ params["layers"]["w"][i]) @ block["v"]
    return mean(x, batch)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(4):
            x = x + nn.Dense(WIDTH, name=f"dense_{i}")(x)
        return nn.BatchNorm(use_running_average=False)(x)


def of_normed(key):
    return Normed().init(key, BATCH["x"])


def normed(params, batch, key, carried):
    x, carried = Normed().apply({"params": params, **carried}, batch["x"], mutable=["batch_stats"])
    return mean(x, batch), {}, carried


def unchanged(params, batch, key, carried):
    return stacked(params, batch, key), {}, carried


NORMED: dict[str, Any] = {
    "init": lambda key: of_normed(key)["params"],
    "carried": lambda key: {"batch_stats": of_normed(key)["batch_stats"]},
    "dims": {},
}
HERE = "test_pipeline_errors.py"
CASES: dict[str, tuple[Any, dict[str, Any], type[MeshparError], list[str]]] = {
    "no layers": (alone, {}, ShardingError, ["parallel.pipeline cuts a model between equal layers"]),
    "batch norm": (
        normed, NORMED, ShardingError,
        ["(Normed.__call__)", "computes the next carried.batch_stats.BatchNorm_0.mean from the batch, as batch norm"],
    ),
    "a sum over all layers": (
        decayed, {}, ShardingError,
        [HERE, "(decayed): layers.w", "only the stage that stores a layer has its parameters", "as weight decay does"],
    ),
    "a count that layers pass on": (
        counting, {}, ShardingError, ["i32[]", "layers pass it to each other, and it has no gradient to send back"],
    ),
    "parameters of layers that are mixed before": (
        mixing, {}, ShardingError,
        [HERE, "(mixing): f32[4,4,4]", "computed from parameters before the layers; compute it inside of the layer"],
    ),
    "a number that each layer returns": (
        chosen, {}, ShardingError, [HERE, "(chosen): i32[4]", "no floating-point number; cast it to a float"],
    ),
    "layers of which one parameter is in a list": (
        scanning_some, {"init": of_both_kinds}, ShardingError,
        ["(scanning_some)", "scans layers.w, which is stacked in dim layers, and blocks.0.v of a list; stack all"],
    ),
    "rows of a stack beside a list": (
        reading_rows, {"init": of_both_kinds}, ShardingError,
        ["(reading_rows)", "reads layers.w, which is stacked in dim layers, one row at a time", "keep all of them"],
    ),
    "a loss for local shards": (
        stacked, {"manual": True}, ConfigError,
        ["parallel.pipeline\n    a loss for local shards is not traced with whole shapes", "manual=False, or"],
    ),
    "XLA's own partitioner": (
        stacked, {"lowering": "auto"}, ConfigError, ["parallel.pipeline\n    GSPMD has no pipeline\n"],
    ),
    "no schedule": (
        stacked, {"parallel": Parallel()}, ConfigError,
        ["the rules cut the model into 2 stages, but no schedule orders their work", "parallel.pipeline={kind: 1f1b"],
    ),
    "a zigzag inside of stages": (
        stacked, {"parallel": Parallel(pipeline={"kind": "1f1b", "num_microbatches": 2}, context={"layout": "zigzag"})},
        ConfigError, ["context.layout\n    stages of a pipeline work at different times", "context.layout=auto"],
    ),
    "pairs of an odd number": (
        stacked,
        {
            "parallel": Parallel(pipeline={"kind": "1f1b", "num_microbatches": 2}),
            "mesh": MeshLayout(pipe=2, context=3).abstract(),
        },
        ConfigError, ["3 shards of a row are an odd number", "parallel.context=all_gather"],
    ),
    "fewer layers than stages": (
        stacked, {"parallel": Parallel(pipeline={"kind": "interleaved", "num_microbatches": 2, "num_chunks": 4})},
        ScheduleError, ["4 layers cannot be cut into 8 parts (2 stages x 4 chunks)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_cut_is_refused_by_name(case):
    loss, more, kind, messages = CASES[case]
    arguments = {
        "init": init, "dims": STACKED, "mesh": MeshLayout(pipe=2).abstract(),
        "parallel": Parallel(pipeline={"kind": "1f1b", "num_microbatches": 2}),
    } | more  # fmt: skip
    rules = AxisRules(preset=("pipeline", "context"), unnamed=())
    with jax.numpy_dtype_promotion("standard"), pytest.raises(kind) as error:
        training(arguments.pop("init"), loss, optax.sgd(0.1), BATCH, rules=rules, **arguments)
    for message in messages:
        assert message in str(error.value)
