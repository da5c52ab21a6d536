"""One dict of optimizers, run through a few properties; each property is also shown to catch a fault."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pydantic
import pytest
from flax import nnx

from meshpar.errors import ShardingError
from meshpar.mesh.layout import MeshLayout
from meshpar.models import GPT
from meshpar.nn.describe import describe
from meshpar.optim import SGD, Adafactor, AdamW, Lion, Muon, Optimizer
from meshpar.optim.base import Matrix
from meshpar.optim.schedule import WSD, Cosine, Linear
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.train.state import place
from meshpar.tree import flatten_with_paths

LR = 0.1
NUM_STEPS = 60
OPTIMIZERS = {
    "adamw": AdamW(lr=LR),
    "lion": Lion(lr=LR),
    "sgd": SGD(lr=LR, momentum=0.0, weight_decay=0.1),
    "sgd_momentum": SGD(lr=LR, momentum=0.5, weight_decay=0.1),
    "adafactor": Adafactor(lr=LR, weight_decay=0.1),
    "adafactor_absolute": Adafactor(lr=LR, clip_rms=None, relative=False, weight_decay=0.1),
    "muon": Muon(lr=3 * LR),
}
SIZES = {"layers": 3, "experts": 2, "embed": 6, "heads": 2, "head_dim": 5, "mlp": 8, "vocab": 9}
BLOCKS = {
    "norm": {"scale": ("layers", "embed")},
    "q": {"kernel": ("layers", "embed", "heads", "head_dim"), "bias": ("layers", "heads", "head_dim")},
    "o": {"kernel": ("layers", "heads", "head_dim", "embed"), "bias": ("layers", "embed")},
    "router": ("layers", "embed", "experts"),
    "up": {"kernel": ("layers", "experts", "embed", "mlp"), "bias": ("layers", "experts", "mlp")},
}
DIMS = {"table": ("vocab", "embed"), "blocks": BLOCKS, "norm": ("embed",), "head": ("embed", "vocab")}
VECTORS = ("norm", "norm.scale", "q.bias", "o.bias", "up.bias")

every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def on_dims(fn, dims):
    return jax.tree.map(fn, dims, is_leaf=lambda x: isinstance(x, tuple))


def drawn(dims, seed=0):
    """Random arrays; `SIZES` gives the size of a dim by its name."""
    rng = np.random.default_rng(seed)
    return on_dims(lambda d: jnp.asarray(rng.normal(size=[SIZES.get(x, 3) for x in d]), jnp.float32), dims)


def update_after(num, tx, params, grads):
    """The last of a few updates, all from the same parameters."""

    def step(state, grads):
        update, state = tx.update(grads, state, params)
        return state, update

    all_updates = jax.lax.scan(step, tx.init(params), jax.tree.map(lambda g: g[:num], grads))[1]
    return jax.tree.map(lambda u: u[-1], all_updates)


def updates(tx, params, num=3):
    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(partial(update_after, num, tx))(params, noise(params))


def noise(params):
    """Three gradients: [3, *shape] of each parameter."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=(3, *p.shape)), p.dtype), params)


def difference(found, expected):
    """The largest difference of any array, relative to its largest element."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return float(np.max([jnp.abs(a - b).max() / jnp.abs(b).max() for a, b in pairs]))


# A quadratic


def remaining(tx):
    """The share of the distance to the minimum that remains, for the slowest parameter."""
    params = drawn(DIMS)
    target = jax.tree.map(lambda x: 2 * x, drawn(DIMS))

    def step(carry, _):
        params, state = carry
        update, state = tx.update(jax.tree.map(jnp.subtract, params, target), state, params)
        return (optax.apply_updates(params, update), state), None

    with jax.numpy_dtype_promotion("standard"):
        (params, _), _ = jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), length=NUM_STEPS))(params)
    left = jax.tree.map(lambda p, t: float(jnp.linalg.norm(p - t) / jnp.linalg.norm(t / 2)), params, target)
    return max(jax.tree.leaves(left))


def descent(optimizer):
    return optimizer.model_copy(update={"weight_decay": 0.0, "schedule": Linear()}).build(NUM_STEPS, DIMS)


@every_optimizer
def test_every_parameter_comes_near_the_minimum_of_a_quadratic(optimizer):
    assert remaining(descent(optimizer)) < 0.2


def test_control_a_frozen_parameter_is_seen():
    frozen = on_dims(lambda d: d == BLOCKS["o"]["bias"], DIMS)
    tx = optax.chain(descent(OPTIMIZERS["adamw"]), optax.masked(optax.set_to_zero(), frozen))
    assert remaining(tx) > 0.9


# The state


def states(tx):
    """The structure, shapes and dtypes of the state by eval_shape, by init and by an update."""
    params = drawn(DIMS)
    with jax.numpy_dtype_promotion("standard"):
        made = tx.init(params)
        updated = jax.eval_shape(tx.update, params, tx.init(params), params)[1]
        abstract = jax.eval_shape(tx.init, params)
    return [jax.tree.map(lambda x: (x.shape, x.dtype), state) for state in (abstract, made, updated)]


@every_optimizer
def test_an_update_keeps_the_structure_of_the_state(optimizer):
    abstract, made, updated = states(optimizer.build(NUM_STEPS, DIMS))
    assert abstract == made == updated


def test_control_a_state_that_changes_is_seen():
    def init(params: Any) -> Any:
        return jnp.int32(0)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return grads, state + 1.0

    _, made, updated = states(optax.GradientTransformation(init, update))  # pyright: ignore
    assert made != updated


def placed(tx):
    specs = on_dims(lambda d: ArraySpec(tuple(SIZES[x] for x in d), np.dtype("float32"), d), DIMS)
    rules = AxisRules.model_validate({"preset": ["fsdp", "megatron"], "vocab": []})
    return place(specs, rules, MeshLayout(fsdp=2, tensor=2).abstract(), tx).opt_state


@every_optimizer
def test_each_array_of_the_state_has_a_placement(optimizer):
    tx = optimizer.build(NUM_STEPS, DIMS)
    assert jax.tree.structure(placed(tx)) == jax.tree.structure(tx.init(drawn(DIMS)))


def test_control_a_state_that_is_like_no_parameter_is_refused():
    def init(params):
        return {"table": jnp.zeros(65)}

    keeps = optax.GradientTransformation(init, lambda grads, state, params: (grads, state))  # pyright: ignore
    with pytest.raises(ShardingError, match="table"):
        placed(keeps)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("adamw", {"mu": ((), ("fsdp",), ("tensor",), ()), "nu": ((), ("fsdp",), ("tensor",), ())}),
        ("muon", {"mu": ((), ("fsdp",), ("tensor",), ())}),
        ("adafactor", {"rows": ((), ("fsdp",)), "columns": ((), ("tensor",), ())}),
    ],
)
def test_moments_are_sharded_over_the_axes_of_their_parameter(name, axes):
    placements = flatten_with_paths(placed(OPTIMIZERS[name].build(NUM_STEPS, DIMS)))
    found = {
        path.split(".blocks")[0].split(".")[-1]: p.axes for path, p in placements.items() if path.endswith("q.kernel")
    }
    assert found == axes


def calls_the_host(tx):
    params = drawn(DIMS)
    with jax.numpy_dtype_promotion("standard"):
        return "callback" in str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))


@every_optimizer
def test_an_update_does_not_call_the_host(optimizer):
    assert not calls_the_host(optimizer.build(NUM_STEPS, DIMS))


def test_control_a_call_to_the_host_is_seen():
    def printing(grads, params):
        jax.debug.callback(print, grads["norm"])
        return grads

    assert calls_the_host(optax.stateless(printing))


# Dims


@pytest.mark.parametrize(
    ("dims", "inputs", "outputs"),
    [
        (("vocab", "embed"), (0,), (1,)),
        (("embed", "heads", "head_dim"), (0,), (1, 2)),
        (("layers", "heads", "head_dim", "embed"), (1, 2), (3,)),
        (("stage", "layers", "experts", "embed", "mlp"), (3,), (4,)),
        (("layers", "embed", "experts"), (1,), (2,)),
        (("height", "breadth", "embed", "channels"), (0, 1, 2), (3,)),
        (("layers", "kv_heads", "head_dim"), (1, 2), ()),
        (("layers", "experts", "mlp"), (2,), ()),
        (("head_dim",), (0,), ()),
        (("layers",), (), ()),
        ((), (), ()),
    ],
)
def test_the_names_of_dims_determine_the_matrix(dims, inputs, outputs):
    assert Matrix.of(dims) == Matrix(inputs, outputs)


def test_in_a_model_norms_and_biases_are_the_vectors():
    model = GPT(num_layers=2, hidden_size=16, num_heads=4, intermediate_size=32)
    specs = flatten_with_paths(describe(nnx.eval_shape(lambda: model.build(nnx.Rngs(0)))))
    vectors = {path for path, spec in specs.items() if not Matrix.of(spec.dims).outputs}
    assert vectors == {path for path in specs if path.endswith((".bias", ".scale"))}
    assert (len(vectors), len(specs)) == (12, 21)


def decayed(tx, rate):
    """The paths of the parameters that shrink by this rate without a gradient; the others must not move."""
    params = drawn(DIMS)
    zeros = jax.tree.map(jnp.zeros_like, noise(params))
    with jax.numpy_dtype_promotion("standard"):
        shrunk = flatten_with_paths(jax.jit(partial(update_after, 1, tx))(params, zeros))
    touched = {path for path, update in shrunk.items() if jnp.any(update != 0)}
    for path in touched:
        np.testing.assert_allclose(shrunk[path], -rate * flatten_with_paths(params)[path], rtol=1e-6)
    return touched


@every_optimizer
def test_weight_decay_shrinks_only_matrices(optimizer):
    matrices = {p for p in flatten_with_paths(drawn(DIMS)) if p.removeprefix("blocks.") not in VECTORS}
    assert decayed(optimizer.build(NUM_STEPS, DIMS), optimizer.lr * 0.1) == matrices


def test_control_weight_decay_of_everything_is_seen():
    assert "norm" in decayed(optax.adamw(LR, weight_decay=0.1), LR * 0.1)


STACKED = {"q": BLOCKS["q"], "up": BLOCKS["up"]}


def stacked_against_single(optimizer, stacked_dims):
    """The difference between the update of stacked layers and the updates of single layers."""
    params = drawn(STACKED)
    tx = optimizer.build(NUM_STEPS, on_dims(lambda d: d[1:], STACKED))
    layers = params, jax.tree.map(lambda g: g.swapaxes(0, 1), noise(params))
    with jax.numpy_dtype_promotion("standard"):
        alone = jax.jit(lambda layers: jax.lax.map(lambda x: update_after(3, tx, *x), layers))(layers)
    return difference(updates(optimizer.build(NUM_STEPS, stacked_dims), params), alone)


@every_optimizer
def test_the_update_of_stacked_layers_equals_those_of_single_layers(optimizer):
    assert stacked_against_single(optimizer, STACKED) < 1e-4


@pytest.mark.parametrize("name", ["adafactor", "adafactor_absolute", "muon"])
def test_control_an_update_that_mixes_layers_is_seen(name):
    unaware = on_dims(lambda d: ("depth", *d[1:]), STACKED)
    assert stacked_against_single(OPTIMIZERS[name], unaware) > 0.1


# Against Optax

PLAIN = {"a": ("mlp", "embed")}
ORACLES = {
    "adamw": (AdamW(lr=LR, b2=0.999), optax.adamw(LR, weight_decay=0.1)),
    "lion": (Lion(lr=LR), optax.lion(LR, weight_decay=0.1)),
    "sgd": (SGD(lr=LR, nesterov=True), optax.sgd(LR, momentum=0.9, nesterov=True)),
    "adafactor": (Adafactor(lr=LR), optax.adafactor(LR, min_dim_size_to_factor=1)),
    "muon": (Muon(lr=LR), optax.contrib.muon(LR, weight_decay=0.1, consistent_rms=0.2)),
}


def from_optax(ours, theirs):
    return difference(updates(ours.build(NUM_STEPS, PLAIN), drawn(PLAIN)), updates(theirs, drawn(PLAIN)))


@pytest.mark.parametrize(("ours", "theirs"), ORACLES.values(), ids=ORACLES)
def test_updates_of_plain_matrices_equal_optax(ours, theirs):
    assert from_optax(ours, theirs) < 1e-4


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Adafactor(lr=LR, decay_exponent=0.7), ORACLES["adafactor"][1]),
        (Adafactor(lr=LR, clip_rms=0.5), ORACLES["adafactor"][1]),
        (Adafactor(lr=LR, relative=False), ORACLES["adafactor"][1]),
        (Muon(lr=LR, nesterov=False), ORACLES["muon"][1]),
        (Muon(lr=LR, num_iterations=4), ORACLES["muon"][1]),
    ],
)
def test_control_another_setting_differs_from_optax(ours, theirs):
    assert from_optax(ours, theirs) > 0.01


# Muon


def singular_values(optimizer, dims):
    """Singular values of q's updates, a matrix [embed, heads * head_dim] for each layer, over their nominal size."""
    update = updates(optimizer.build(NUM_STEPS, {"q": dims}), drawn({"q": dims}))["q"]
    layers, embed, heads, size = update.shape
    matrices = update.reshape(layers, embed, heads * size) / (LR * 0.2 * max(embed, heads * size) ** 0.5)
    return np.linalg.svd(matrices, compute_uv=False)


def test_muon_updates_hidden_matrices_and_adam_the_rest():
    state = flatten_with_paths(OPTIMIZERS["muon"].build(NUM_STEPS, DIMS).init(drawn(DIMS)))
    adams = {path.split(".nu.")[1].removeprefix("blocks.") for path in state if ".nu." in path}
    assert adams == {"table", "head", *VECTORS}


def test_muons_updates_have_singular_values_near_one():
    values = singular_values(Muon(lr=LR, weight_decay=0.0), BLOCKS["q"]["kernel"])
    assert values.shape == (3, 6)
    assert values.min() > 0.6
    assert values.max() < 1.3


@pytest.mark.parametrize(
    ("optimizer", "dims"),
    [
        (SGD(lr=LR), BLOCKS["q"]["kernel"]),
        (Muon(lr=LR, weight_decay=0.0), ("layers", "embed", "halves", "head_dim")),
        (Muon(lr=LR, weight_decay=0.0), ("depth", "embed", "heads", "head_dim")),
    ],
    ids=["not_muon", "heads_as_inputs", "layers_as_inputs"],
)
def test_control_other_updates_have_other_singular_values(optimizer, dims):
    values = singular_values(optimizer, dims)
    assert values.min() < 0.6 or values.max() > 1.3


def test_the_reported_learning_rate_is_the_one_used():
    optimizer = SGD(lr=LR, momentum=0.0, schedule=Cosine(warmup_steps=2))
    tx = optimizer.build(9, PLAIN)
    params = drawn(PLAIN)
    state = tx.init(params)
    rates = []
    for _ in range(9):
        update, state = tx.update(params, state, params)
        rates.append(-jax.tree.leaves(update)[0][0, 0] / params["a"][0, 0])
    np.testing.assert_allclose(rates, optimizer.learning_rate(9)(jnp.arange(9)), rtol=1e-5)


# Configs


def test_an_optimizer_is_chosen_by_its_kind():
    written = {"kind": "adamw", "lr": 3e-4, "schedule": {"kind": "cosine", "warmup_steps": 100}}
    read = pydantic.TypeAdapter(Optimizer).validate_python(written)
    assert read == AdamW(lr=3e-4, schedule=Cosine(warmup_steps=100))


@every_optimizer
def test_an_optimizer_survives_a_round_trip_through_its_config(optimizer):
    optimizer = optimizer.model_copy(update={"schedule": WSD(decay_steps=7)})
    assert pydantic.TypeAdapter(Optimizer).validate_python(optimizer.model_dump()) == optimizer


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"lr": 0}, "adamw.lr"),
        ({"lr": float("inf")}, "adamw.lr"),
        ({"b2": 1.0}, "adamw.b2"),
        ({"clip_norm": 0}, "adamw.clip_norm"),
        ({"weight_decay": -0.1}, "adamw.weight_decay"),
        ({"learning_rate": 0.1}, "adamw.learning_rate"),
        ({"schedule": {"kind": "cosine", "final": 1.1}}, "adamw.schedule.cosine.final"),
        ({"schedule": {"kind": "wsd", "decay_steps": 1, "decay_fraction": 0.1}}, "adamw.schedule.wsd"),
        ({"schedule": {"kind": "step"}}, "adamw.schedule"),
    ],
)
def test_an_invalid_value_is_refused_by_its_key(wrong, where):
    with pytest.raises(pydantic.ValidationError) as error:
        pydantic.TypeAdapter(Optimizer).validate_python({"kind": "adamw", "lr": 0.1} | wrong)
    assert [".".join(map(str, e["loc"])) for e in error.value.errors()] == [where]
