"""Every schedule runs any model with a stack of layers, and computes what plain `jit` computes on one device."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshpar import AxisRules, MeshLayout, layers, training, verify
from meshpar.errors import ShardingError
from meshpar.parallel.pipeline import execute
from meshpar.parallel.pipeline.get_schedule import get_schedule
from meshpar.parallel.pipeline.partition import StagePartition
from meshpar.parallel.strategies import Parallel
from meshpar.partition import blocks, chain
from meshpar.train.loss import LossSums
from meshpar.train.program import shardings
from meshpar.train.stale_weights import STALE
from meshpar.train.state import TrainState
from meshpar.train.training import Training, step_key
from meshpar.tree import flatten_with_paths
from meshpar.verification.trial import Trial
from tests.comparison import largest_difference
from tests.zoo import MODELS, Zoo
from tests.zoo.reference import first, moved, reference, without_keys

ROWS, WIDTH = 16, 8
MESHES: dict[str, tuple[dict[str, int], list[str]]] = {
    "alone": ({}, ["replicated"]),
    "pipe2": ({"pipe": 2}, ["pipeline"]),
    "pipe4": ({"pipe": 4}, ["pipeline"]),
    "data2_tensor2": ({"pipe": 2, "data": 2, "tensor": 2}, ["pipeline", "megatron"]),
    "fsdp2_tensor2_sp": ({"pipe": 2, "fsdp": 2, "tensor": 2}, ["pipeline", "fsdp", "megatron_sp"]),
    "zero2": ({"pipe": 2, "fsdp": 4}, ["pipeline", "zero2"]),
    "zero1": ({"pipe": 2, "fsdp": 4}, ["pipeline", "zero1"]),
    "context2_tensor2": ({"pipe": 2, "context": 2, "tensor": 2}, ["pipeline", "context", "megatron"]),
    "context4": ({"pipe": 2, "context": 4}, ["pipeline", "context"]),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zbv", "pipedream_2bw")


@pytest.fixture(autouse=True)
def _float64(float64):
    """Every test of this module computes in float64, with the promotions that users have."""
    with jax.numpy_dtype_promotion("standard"):
        yield


# Models that the zoo does not have ------------------------------------------------------------------------------------


def rows() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(ROWS, WIDTH)), "y": rng.normal(size=(ROWS, WIDTH))}


def drawn(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float64) * 0.3


def plain() -> Zoo:
    """A list of plain parameters, which the loss casts before it reads any; tied ends; a sum and its count."""

    def init(key):
        keys = jax.random.split(key, 9)
        blocks = [{"w": drawn(k, WIDTH, 16), "v": drawn(k, 16, WIDTH)} for k in keys[:8]]
        return {"ends": drawn(keys[8], WIDTH, WIDTH), "blocks": blocks}

    def loss(params, batch, key):
        params = jax.tree.map(lambda x: x.astype(jnp.float64) * 1.0, params)
        x = batch["x"] @ params["ends"]
        for block in params["blocks"]:
            x = x + jnp.tanh(x @ block["w"]) @ block["v"]
        errors = jnp.square(x @ params["ends"].T - batch["y"]).mean(-1)
        return LossSums(errors.sum(), jnp.int32(errors.size), {"largest": jnp.abs(x).sum()})

    return Zoo("plain", init, loss, rows(), rules={"unnamed": ()})


def collecting() -> Zoo:
    """`jax.lax.scan` over stacked parameters: it carries two values, collects a number a layer, and reads a bias."""

    def init(key):
        a, b, c = jax.random.split(key, 3)
        return {
            "layers": {"w": drawn(a, 8, WIDTH, WIDTH)},
            "bias": drawn(b, WIDTH, WIDTH),
            "out": drawn(c, WIDTH, WIDTH),
        }

    def loss(params, batch, key):
        params = jax.tree.map(lambda x: 2.0 * x.astype(jnp.float64), params)  # each layer of its own row
        bias = batch["x"] @ params["bias"]  # every layer reads it, and it has a gradient

        def layer(carry, layer):
            x, total = carry
            y = jnp.tanh(x @ layer["w"] + bias)
            return (x + y, total + jnp.square(y).mean(-1)), jnp.abs(y).mean()

        (x, total), shares = jax.lax.scan(layer, (batch["x"], jnp.zeros(len(batch["x"]))), params["layers"])
        mean = jnp.square(x @ params["out"] - bias - batch["y"]).mean() + 0.1 * total.mean() + 0.01 * shares.sum()
        return mean, {"shares": shares.mean()}

    return Zoo(
        "collecting", init, loss, rows(), dims={"layers.w": ("layers", "in", "out")},
        rules={"unnamed": (), "in": (), "out": ()},
    )  # fmt: skip


def halves() -> Zoo:
    """The dim that layers pass on is sharded over `tensor`."""

    def init(key):
        a, b = jax.random.split(key)
        return {"layers": drawn(a, 8, WIDTH, WIDTH), "out": drawn(b, WIDTH, WIDTH)}

    def loss(params, batch, key):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch["x"], params["layers"])
        return jnp.square(x @ params["out"] - batch["y"]).mean()

    return Zoo("halves", init, loss, rows(), dims={"layers": ("layers", "embed", "mlp")}, rules={"unnamed": ()})


class Alternating(nnx.Module):
    """Blocks of two kinds in turn, in one list; each draws its dropout from a key of its own."""

    def __init__(self, *, rngs: nnx.Rngs):
        def block(i: int) -> nnx.Module:
            make = nnx.LayerNorm if i % 2 else nnx.RMSNorm
            return nnx.Sequential(make(WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs))

        self.blocks = nnx.List([block(i) for i in range(8)])


def alternating() -> Zoo:
    with nnx.use_eager_sharding(False):
        graph = nnx.graphdef(nnx.eval_shape(lambda: Alternating(rngs=nnx.Rngs(0))))

    def init(key):
        params = nnx.state(Alternating(rngs=nnx.Rngs(key)), nnx.Param)
        return jax.tree.map(lambda x: x.astype(jnp.float64), params)

    def loss(params, batch, key):
        x = batch["x"]
        for i, block in enumerate(nnx.merge(graph, params).blocks):
            x = x + jax.nn.relu(block(x)) * jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, (WIDTH,))
        return jnp.square(x - batch["y"]).mean()

    return Zoo("alternating", init, loss, rows(), rules={"unnamed": ()}, draws=True)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jax.nn.relu(self.linear(x)))


class Dropping(nnx.Module):
    """Stacked layers, each of which counts the keys that its dropout drew."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.layers = nnx.split_rngs(splits=4)(nnx.vmap(Layer))(rngs)

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def dropping() -> Zoo:
    with nnx.use_eager_sharding(False):
        graph = nnx.graphdef(nnx.eval_shape(lambda: Dropping(rngs=nnx.Rngs(0))))

    def init(key):
        params = nnx.state(Dropping(rngs=nnx.Rngs(key)), nnx.Param)
        return jax.tree.map(lambda x: x.astype(jnp.float64), params)

    def counts(key):
        return nnx.state(Dropping(rngs=nnx.Rngs(key)), nnx.Not(nnx.Param))

    def loss(params, batch, key, carried):
        model = nnx.merge(graph, params, carried)
        error = jnp.square(model(batch["x"]) - batch["y"]).mean()
        return error, {}, nnx.state(model, nnx.Not(nnx.Param))

    return Zoo("dropping", init, loss, rows(), rules={"unnamed": ()}, carried=counts)


def translating() -> Zoo:
    """Two loops over stacks, an encoder and a decoder, whose layers all read what the encoder returns; tied ends."""

    def init(key):
        keys = jax.random.split(key, 4)
        layers = [drawn(k, 4, WIDTH, WIDTH) for k in keys[:3]]
        return {"encoder": layers[0], "decoder": {"w": layers[1], "c": layers[2]}, "ends": drawn(keys[3], WIDTH, WIDTH)}

    def loss(params, batch, key):
        def encode(x, w):
            return x + jnp.tanh(x @ w), None

        source = jax.lax.scan(encode, batch["x"] @ params["ends"], params["encoder"])[0]
        source = source / (1 + jnp.square(source).mean(-1, keepdims=True)) @ params["ends"]

        def decode(x, layer):
            return x + jnp.tanh(x @ layer["w"] + source @ layer["c"]), None

        x = jax.lax.scan(decode, batch["y"] @ params["ends"], params["decoder"])[0]
        return jnp.square(x @ params["ends"].T + source - batch["y"]).mean(), {"largest": jnp.abs(source).mean()}

    names = ("layers", "in", "out")
    dims = {"encoder": names, "decoder.*": names}
    return Zoo("translating", init, loss, rows(), dims=dims, rules={"unnamed": (), "in": (), "out": ()})


def towers() -> Zoo:
    """Two lists that do not read each other, as CLIP's towers, of other widths; contrasted over all rows."""

    def init(key):
        keys = iter(jax.random.split(key, 24))
        image = [{"w": drawn(next(keys), WIDTH, 16), "v": drawn(next(keys), 16, WIDTH)} for _ in range(4)]
        text = [{"w": drawn(next(keys), 6, 6), "scale": drawn(next(keys), 6)} for _ in range(6)]
        stems = {"pixels": drawn(next(keys), WIDTH, WIDTH), "tokens": drawn(next(keys), WIDTH, 6)}
        return {"image": image, "text": text, "head": drawn(next(keys), WIDTH, 6)} | stems

    def loss(params, batch, key):
        x = batch["x"] @ params["pixels"]
        for block in params["image"]:
            x = x + jnp.tanh(x @ block["w"]) @ block["v"]
        y = batch["y"] @ params["tokens"]
        for block in params["text"]:
            y = y + jnp.sin(y @ block["w"]) * block["scale"]
        logits = (x @ params["head"]) @ y.T
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(logits))).mean()

    return Zoo("towers", init, loss, rows(), rules={"unnamed": ()})


def marked() -> Zoo:
    """Blocks without numbers in their paths, whose first one is called otherwise: `meshpar.layers` marks them."""
    names = ["stem", *"abcdefg"]

    def init(key):
        keys = jax.random.split(key, 9)
        return {name: {"w": drawn(k, WIDTH, WIDTH)} for name, k in zip(names, keys, strict=False)} | {
            "head": drawn(keys[8], WIDTH, WIDTH)
        }

    def loss(params, batch, key):
        blocks = [jax.tree.map(lambda w: w.astype(jnp.float64) * 0.5, params[name]) for name in names]
        x = layers(blocks, batch["x"] @ params["head"], lambda block, x: x + jnp.tanh(x @ block["w"]))
        return jnp.square(x - batch["y"]).mean()

    return Zoo("marked", init, loss, rows(), rules={"unnamed": ()})


def unlike() -> Zoo:
    """A list whose first block differs from the others: it belongs to the first stage's end."""

    def init(key):
        keys = jax.random.split(key, 9)
        return {"blocks": [{"w": drawn(k, WIDTH, WIDTH)} for k in keys]}

    def loss(params, batch, key):
        x = jnp.sin(batch["x"])
        for i, block in enumerate(params["blocks"]):
            x = x + (jnp.tanh(x @ block["w"]) if i else jnp.cos(x @ block["w"].T))
        return jnp.square(x - batch["y"]).mean()

    return Zoo("unlike", init, loss, rows(), rules={"unnamed": ()})


class Residual(nn.Module):
    """A residual CNN with equal blocks, recomputed in the backward, between a stem and a head."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3), param_dtype=jnp.float64, name="stem")(x)
        for i in range(4):
            x = nn.remat(Convolutions)(name=f"stage_{i}")(x)
        return nn.Dense(3, param_dtype=jnp.float64, name="head")(x.mean((1, 2)))


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.relu(nn.GroupNorm(2, param_dtype=jnp.float64)(nn.Conv(4, (3, 3), param_dtype=jnp.float64)(x)))
        return x + nn.Conv(4, (3, 3), param_dtype=jnp.float64)(y)


def residual() -> Zoo:
    rng = np.random.default_rng(0)
    images = {"image": rng.normal(size=(ROWS, 6, 6, 2)), "label": rng.integers(0, 3, ROWS)}

    def init(key):
        return Residual().init(key, jnp.ones((1, 6, 6, 2)))["params"]

    def loss(params, batch, key):
        logits = Residual().apply({"params": params}, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    return Zoo("residual", init, loss, images, rules={"unnamed": ()})


OWN = {
    "plain": plain, "collecting": collecting, "alternating": alternating, "residual": residual,
    "translating": translating, "towers": towers, "marked": marked, "halves": halves,
    "unlike": unlike,
}  # fmt: skip
ONE = {"vit", "lm1b_linen", "gpt2", "dit", "t5", "bert", "convnext", "towers", "ragged_mixture"}
"""Models that draw random numbers, divide by a number of tokens or compare rows: only a whole batch has that loss."""
LAYERED = ("llama", "gpt2", "stacked_nnx", "vit", "mixer", "whisper", "mamba", "gshard")
"""Models of the zoo that get four layers here instead of two."""
TWELVE = [
    "llama",  # Linen's scan
    "gpt2",  # a list of NNX
    "stacked_nnx",  # NNX's scan
    "plain",  # a pytree
    "vit",
    "mixer",
    "whisper",  # an encoder and a decoder
    "towers",  # as CLIP's
    "residual",  # a CNN with equal blocks
    "mamba",
    "gshard",  # a mixture of experts
    "alternating",
]
TOKENS = {"llama", "gpt2", "stacked_nnx", "gshard"}
"""Those of the twelve whose rows are divided over `context`."""
FURTHER = ["collecting", "translating", "marked", "halves", "unlike"]
EIGHT_LAYERS = {"plain", "collecting", "marked", "halves", "unlike"}
TWO_LAYERS = ["gemma", "bert", "lm1b_linen", "dit", "fnet", "t5", "convnext", "ragged_mixture"]


def placed(model: str, kind: str, number: int) -> str:
    """The mesh of a case: each in turn, so that each schedule meets each."""
    meshes = [*MESHES][1:8] if model in TOKENS else [*MESHES][1:7]
    mesh = meshes[number % len(meshes)]
    at_most = 2 if model in TWO_LAYERS else 8 if model in EIGHT_LAYERS else 4
    parts = MESHES[mesh][0]["pipe"] * (2 if kind in ("interleaved", "zbv") else 1)
    return mesh if parts <= at_most else "pipe2"


CASES = [
    (model, kind, placed(model, kind, i + j))
    for i, model in enumerate([*TWELVE, *FURTHER, *TWO_LAYERS])
    for j, kind in enumerate(SCHEDULES)
    if not (kind in ("interleaved", "zbv") and model in TWO_LAYERS)
]
SAMPLE: dict[str, list[str]] = {
    "llama": ["zb_h1"],
    "gpt2": ["1f1b"],
    "stacked_nnx": ["zb_h2"],
    "plain": list(SCHEDULES),
    "vit": ["zb_h1"],
    "mixer": ["zb_h2"],
    "towers": ["zb_h2"],
    "residual": ["interleaved"],
    "mamba": ["zb_h2"],
    "gshard": ["zbv", "pipedream_2bw"],
    "alternating": ["1f1b"],
    "translating": ["zbv"],  # an encoder and a decoder; whisper takes ten times as long
    "collecting": ["zb_h1"],
    "marked": ["gpipe"],
    "halves": ["interleaved"],
    "unlike": ["gpipe"],
}


@pytest.fixture(autouse=True)
def _four_layers(monkeypatch):
    for name in LAYERED:
        monkeypatch.setattr(f"tests.zoo.{name}.LAYERS", 4)


@lru_cache
def on_one_device(model: str, num_microbatches: int = 1) -> tuple[Zoo, Any, Any]:
    """The model, its parameters, and what plain `jit` computes: the mean over as many microbatches."""
    zoo = OWN[model]() if model in OWN else MODELS[model]()
    params = jax.device_get(moved(first(zoo.init, jax.random.key(0))))
    key = step_key(0, np.int32(0)) if zoo.draws else None
    return zoo, params, reference(replace(zoo, loss=mean_of(zoo.loss, num_microbatches)), params, zoo.batch, key)


def mean_of(loss: Any, num_microbatches: int) -> Any:
    def mean(params, batch, key):
        found = []
        for i in range(num_microbatches):
            found_one = loss(params, {name: x[i::num_microbatches] for name, x in batch.items()}, key)
            one = found_one[0] if isinstance(found_one, tuple) else found_one
            found.append(one.loss / one.count if isinstance(one, LossSums) else one)
        return sum(found) / num_microbatches

    return mean


def piped(zoo: Zoo, schedule: Any, mesh: str, context: Any = None, **more: Any) -> Training:
    sizes, presets = MESHES[mesh]
    layout = MeshLayout(**sizes)
    named = {name: ("batch", "seq") for name, x in zoo.batch.items() if x.ndim == 2 and x.dtype.kind == "i"}
    if not named:
        presets = ["megatron" if preset == "megatron_sp" else preset for preset in presets]
    named_dims = {dim for dims in zoo.dims.values() for dim in dims}
    if not {"heads", "mlp"} & named_dims and zoo.name in OWN:
        presets = [preset for preset in presets if not preset.startswith("megatron")]
        layout = MeshLayout(**{axis: size for axis, size in sizes.items() if axis != "tensor"})
    if zoo.name in OWN and ({*presets} & {"fsdp", "zero1", "zero2"}):
        zoo = replace(zoo, rules=zoo.rules | {"unnamed": (), "largest": ("fsdp",)})
    return training(
        zoo.init, zoo.loss, optax.sgd(0.1), dict(zoo.batch), mesh=layout.build(jax.devices()[: layout.requested()]),
        rules=AxisRules(preset=presets, **zoo.rules), dims=zoo.dims, batch_dims=named, draws=zoo.draws,
        compute_dtype=np.dtype("float64"), parallel=Parallel(pipeline=schedule, context=context), **more,
    )  # fmt: skip


def first_step(piped: Training, params: Any, batch: Any) -> Any:
    """Stale gradients are those of the parameters before the last update, here `params`."""
    is_stale = piped.pipeline is not None and piped.pipeline.schedule.is_stale
    now = jax.tree.map(lambda x: 1.5 * x, params) if is_stale else params
    state = TrainState(np.int32(0), now, optax.sgd(0.1).init(now), np.int32(0), {STALE: params} if is_stale else {})
    return Trial(piped).run(jax.device_put(state, shardings(piped.placement.structs)), [dict(batch)])[1][0]


def difference(model: str, kind: str, mesh: str) -> float:
    whole = 2 if kind == "interleaved" else 1  # its microbatches are a multiple of its stages
    zoo, params, one = on_one_device(model, whole if model in ONE else 1)
    schedule = get_schedule(kind, MESHES[mesh][0]["pipe"], whole if model in ONE else 4)
    found = first_step(piped(zoo, schedule, mesh), params, zoo.batch)
    wanted = {"loss": one.loss} | {f"gradients.{k}": g for k, g in flatten_with_paths(one.grads).items()}
    have = {"loss": found.loss["loss"]} | {f"gradients.{k}": g for k, g in found.gradients.items()}
    assert wanted.keys() == have.keys()
    return max(float(np.abs(have[name] - wanted[name]).max()) for name in wanted)


@pytest.mark.parametrize(
    ("model", "kind", "mesh"),
    [
        pytest.param(*case, marks=[] if case[1] in SAMPLE.get(case[0], []) else pytest.mark.slow, id="-".join(case))
        for case in CASES
    ],
)
def test_a_users_model_in_stages_is_equal_to_one_device(model, kind, mesh):
    assert difference(model, kind, mesh) < 1e-10


def test_blocks_with_recognized_attention_are_equal():
    """Each block's attention is an operation with functions of its own."""
    found = piped(MODELS["dit"](), get_schedule("gpipe", 2, 1), "pipe2").described_cut
    assert found and "2 equal layers, a list" in found


def nested():
    """Numbered blocks in numbered stages, of which one is wider, in a model whose own name ends in a number."""
    sizes = {"stage_0": [WIDTH], "stage_1": [2 * WIDTH] * 4}

    def init(key):
        return {"net50": {stage: {f"block_{i}": jnp.eye(size) / 2 for i, size in enumerate(several)}
                          for stage, several in sizes.items()}}  # fmt: skip

    def loss(params, batch, key):
        stages = params["net50"]
        x = jnp.tanh(batch["x"] @ stages["stage_0"]["block_0"])
        x = jnp.concatenate([x, x], axis=-1)
        for i in range(4):
            x = jnp.tanh(x @ stages["stage_1"][f"block_{i}"])
        return jnp.square(x).mean()

    return Zoo("nested", init, loss, rows(), rules={"unnamed": ()})


def test_blocks_are_found_by_any_number_of_their_paths():
    found = piped(nested(), get_schedule("gpipe", 2, 4), "pipe2").described_cut
    assert found and "4 equal layers, a list" in found


def test_planted_blocks_in_numbered_modules_are_not_found_by_the_first_number(monkeypatch):
    outer = blocks._outer_first

    def first(found):
        yield from outer({kind: one for kind, one in found.items() if len(kind) == 1})

    monkeypatch.setattr(blocks, "_outer_first", first)
    with pytest.raises(ShardingError, match="the loss has none"):
        piped(nested(), get_schedule("gpipe", 2, 4), "pipe2")


def test_marked_modules_are_cut():
    """Modules of one structure, under names without numbers."""

    def built(key):
        linear = [nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(key), param_dtype=jnp.float64) for _ in range(4)]
        return nnx.Dict(one=linear[0], two=linear[1], three=linear[2], four=linear[3])

    graph = nnx.graphdef(nnx.eval_shape(lambda: built(jax.random.key(0))))

    def loss(params, batch, key):
        model = nnx.merge(graph, params)
        x = layers([model.one, model.two, model.three, model.four], batch["x"], lambda m, x: jnp.tanh(m(x)))
        return jnp.square(x - batch["y"]).mean()

    zoo = Zoo("modules", lambda key: nnx.state(built(key)), loss, rows(), rules={"unnamed": ()})
    found = piped(zoo, get_schedule("gpipe", 2, 4), "pipe2").described_cut
    assert found and "4 equal layers, a list" in found


@pytest.mark.parametrize(
    ("context", "mesh"),
    [
        pytest.param("all_gather", "context2_tensor2", marks=pytest.mark.slow),
        pytest.param("ulysses", "context2_tensor2", marks=pytest.mark.slow),
        ("ring", "context2_tensor2"),
        pytest.param(None, "context4", marks=pytest.mark.slow),
        pytest.param({"kind": "hybrid", "group": 2}, "context4", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_stages_share_rows(context, mesh):
    """Attention of shards of a row, inside of stages."""
    zoo, params, one = on_one_device("llama")
    made = piped(zoo, get_schedule("zb_h2", 2, 4), mesh, context=context)
    assert made.pipeline and "partitioned" in str(made.pipeline.parts.cut.layer)  # pyright: ignore
    found = first_step(made, params, zoo.batch)
    assert largest_difference(found.gradients, flatten_with_paths(one.grads)) < 1e-10


@pytest.mark.parametrize("make", [pytest.param(MODELS["lm1b_nnx"], marks=pytest.mark.slow, id="lm1b"), dropping])
def test_a_state_of_random_counts_passes_through_the_microbatches(make):
    """An NNX model whose dropout draws from counted keys: a step of two microbatches is one of two in turn."""
    zoo = make()
    params, carried = (moved(first(x, jax.random.key(0))) for x in (zoo.init, zoo.carried))
    params, carried = jax.device_get((params, without_keys(carried)))

    def step(**more):
        made = piped(zoo, more.pop("schedule", None), more.pop("mesh", "pipe2"), carried=zoo.carried, **more)
        state = TrainState(np.int32(0), params, optax.sgd(0.1).init(params), np.int32(0), carried)
        return Trial(made).run(jax.device_put(state, shardings(made.placement.structs)), [dict(zoo.batch)])[1][0]

    found = step(schedule=get_schedule("1f1b", 2, 2))
    wanted = step(mesh="alone", num_microbatches=2)
    for kind in ("loss", "gradients", "carried"):
        assert largest_difference(getattr(found, kind), getattr(wanted, kind)) < 1e-10


def test_counts_that_stay_in_the_loop_over_layers_are_refused(monkeypatch):
    monkeypatch.setattr(chain, "counters_apart", lambda flat: flat)
    zoo = dropping()
    with pytest.raises(ShardingError, match=r"computes the next carried\.layers\.dropout\.rngs\.count"):
        piped(zoo, get_schedule("1f1b", 2, 2), "pipe2", carried=zoo.carried)


def test_an_evaluation_in_stages_is_that_of_one_device():
    zoo, params, _ = on_one_device("llama")
    losses = []
    for schedule, mesh in [(get_schedule("interleaved", 2, 4), "data2_tensor2"), (None, "alone")]:
        made = piped(zoo, schedule, mesh)
        batch = {name: jax.device_put(x, made.batch[name].sharding) for name, x in zoo.batch.items()}
        placed = jax.device_put(params, shardings(made.placement.structs.params))
        losses.append(jax.device_get(made.compile_evaluation()(placed, batch, {})))
    assert abs(losses[0]["loss"] / losses[0]["tokens"] - losses[1]["loss"] / losses[1]["tokens"]) < 1e-10


# Planted faults ------------------------------------------------------------------------------------------------------


def late(patch):
    plan = execute.Pipeline.plan

    def delayed(self, ctx, forward_only=False):
        ticks, cut = plan(self, ctx, forward_only)
        received = np.roll(np.asarray(ticks.rows.received), 1, axis=0)
        return replace(ticks, rows=ticks.rows._replace(received=received)), cut

    patch.setattr(execute.Pipeline, "plan", delayed)


def once_a_stage(patch):
    at_end = execute._Stage._if_end

    def everywhere(self, is_end, change, changed, *args):
        is_first = getattr(change, "__name__", "") == "_embedding_gradient"
        return at_end(self, jnp.ones_like(is_end) if is_first else is_end, change, changed, *args)

    patch.setattr(execute._Stage, "_if_end", everywhere)


def twice(patch):
    cut = execute.Pipeline.cut

    def again(self, ctx):
        layers = cut(self, ctx).layers.copy()
        layers[-1, 0, 0] = layers[0, 0, 0]  # nothing, on one stage
        return StagePartition(layers)

    patch.setattr(execute.Pipeline, "cut", again)


@pytest.mark.parametrize("plant", [None, late, once_a_stage, twice])
def test_verify_blames_planted_faults_of_stages_on_pipe(plant, monkeypatch):
    """A message a tick late, a gradient of what all stages share counted once a stage, a layer twice."""
    if plant:
        plant(monkeypatch)
    zoo = collecting()
    made = piped(zoo, get_schedule("1f1b", 2, 4), "data2_tensor2")
    found = verify(made, [zoo.batch, rows()])
    assert [row.name for row in found.culprits] == (["pipe=2"] if plant else []), str(found)
