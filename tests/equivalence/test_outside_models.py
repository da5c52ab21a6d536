"""The theorem for models that use nothing of meshpar's: what they compute does not depend on the mesh."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshpar import AxisRules, MeshLayout, training, verify
from meshpar.interop import losses, specs
from meshpar.parallel.strategies import Parallel
from meshpar.train import step
from meshpar.train.step import Update, with_rows
from meshpar.tree import flatten_with_paths
from meshpar.verification.compare import compare, without_gradient
from meshpar.verification.trial import QUICK, Trial
from meshpar.verification.verify import _widened, wide_batch
from tests.comparison import largest_difference
from tests.equivalence.outside import MODELS, VOCAB, WIDTH, nll, numbers

LAYOUTS = {
    "one": ({}, "replicated"),
    "data8": ({"data": 8}, "replicated"),
    "fsdp8": ({"fsdp": 8}, "fsdp"),
    "tensor4": ({"tensor": 4}, "megatron"),
    "data2_fsdp2_tensor2": ({"data": 2, "fsdp": 2, "tensor": 2}, ("fsdp", "megatron")),
}
EVERY = list(product(MODELS, list(LAYOUTS)[1:]))
# Six models on one axis each, in turn, and all models on three axes.
SAMPLE = {(model, list(LAYOUTS)[1 + i % 3]) for i, model in enumerate(list(MODELS)[:6])}
SAMPLE |= {(model, "data2_fsdp2_tensor2") for model in MODELS}
CASES = [pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.slow, id="-".join(case)) for case in EVERY]


@pytest.fixture(autouse=True)
def _precision(float64):
    with jax.numpy_dtype_promotion("standard"):
        yield


def trained(model, layout):
    """The state after three steps in float64, and what the steps computed."""
    make, batch = MODELS[model]
    sizes, preset = LAYOUTS[layout]
    mesh = MeshLayout(**sizes)
    mesh = mesh.build(jax.devices()[: mesh.requested() or 1])
    trial = Trial(_widened(make(mesh, AxisRules(preset=preset))))
    return trial.run(trial.start(), [wide_batch(batch(seed)) for seed in (1, 2, 3)])


@lru_cache
def on_one_device(model):
    return trained(model, "one")[1]


def first_difference(model, taken):
    return compare(taken, on_one_device(model), without_gradient(on_one_device(model))).first


@pytest.mark.sample(4)
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_an_outside_model_is_equal_to_one_device(model, layout):
    state, taken = trained(model, layout)
    assert first_difference(model, taken) is None
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(state.params)) or layout == "data8"


# Axes, names and state of the model; further evaluations of the loss--------------------------------------------------


def traced(model, layout="data2_fsdp2_tensor2"):
    sizes, preset = LAYOUTS[layout]
    adopted = MODELS[model][0](MeshLayout(**sizes).build(), AxisRules(preset=preset)).on(manual=False)
    return adopted, str(jax.make_jaxpr(adopted.step)(adopted.placement.structs, adopted.batch))


def test_a_models_own_names_of_axes_are_mapped_to_the_mesh():
    adopted, program = traced("gemma")
    specs = {path: p.pspec for path, p in flatten_with_paths(adopted.placement.params).items()}
    assert specs["table.value"] == P("tensor", "fsdp")
    assert specs["o.w.value"] == P("tensor", None, "fsdp")
    assert "spec=P('fsdp', None, 'tp')" in program


def test_names_that_only_activations_have_follow_their_rules():
    _, program = traced("unet")
    assert "spec=P(('data', 'fsdp'), 'tensor', None, None)" in program


def test_random_keys_are_replicated_integers_in_the_state():
    adopted, _ = traced("regularized")
    carried = flatten_with_paths(adopted.placement.carried)
    assert carried["dropout.rngs.key.value"].spec.dims == ("key_data",)
    state = adopted.compile_init()()
    counts = [int(flatten_with_paths(state.carried)["dropout.rngs.count.value"])]
    new, _ = adopted.compile_step()(state, adopted.put(numbers(1)))
    counts.append(int(flatten_with_paths(new.carried)["dropout.rngs.count.value"]))
    assert counts[1] == counts[0] + 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["sam", "sam_in_turns", "lbfgs"])
def test_an_optimizer_that_evaluates_the_loss_again_equals_a_loop_by_hand(name):
    """The loop is that of Optax's documentation, on one device."""
    _, taken = trained(name, "data2_fsdp2_tensor2")
    adopted = MODELS[name][0](MeshLayout().build(jax.devices()[:1]), AxisRules(preset="replicated"))
    tx = adopted.update.tx
    adopted = _widened(adopted)
    params = jax.device_get(Trial(adopted).start().params)
    opt_state = tx.init(params)
    for seed, result in zip((1, 2, 3), taken, strict=True):
        batch = with_rows(wide_batch(numbers(seed)))

        def loss(params, batch=batch):
            tally = adopted.loss(params, batch, None, {})
            return tally.loss / tally.count

        value, grad = jax.value_and_grad(loss)(params)
        more = {"value": value, "grad": grad, "value_fn": loss} if name == "lbfgs" else {}
        more |= {"grad_fn": lambda params, _: jax.grad(loss)(params)} if name == "sam" else {}
        updates, opt_state = tx.update(grad, opt_state, params, **more)
        params = optax.apply_updates(params, updates)
        got = flatten_with_paths(params)
        assert max(abs(got[path] - x).max() for path, x in result.parameters.items()) < 1e-10


# Metrics and regions of a user's own loss --------------------------------------------------------------------------


def metrics_of(mesh, **more):
    sizes, preset = LAYOUTS[mesh]
    layout = MeshLayout(**sizes)
    mesh = layout.build(jax.devices()[: layout.requested() or 1])
    mlp = MODELS["mlp"][0](mesh, AxisRules(preset=preset))
    trial = Trial(_widened(replace(mlp, key=None).on(**more)))
    batch = trial.training.put(wide_batch(numbers(1)))
    evaluated = trial.training.compile_evaluation()(trial.start().params, batch, {})
    _, metrics, _ = trial._step(trial.start(), batch)
    return jax.device_get(metrics), jax.device_get(evaluated)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_metrics_beside_the_loss_are_means_over_all_rows(num_microbatches):
    on_one, _ = metrics_of("one")
    on_eight, evaluated = metrics_of("data2_fsdp2_tensor2", num_microbatches=num_microbatches)
    assert 0 < on_one["accuracy"] < 1
    assert abs(on_eight["accuracy"] - on_one["accuracy"]) < 1e-10
    assert abs(evaluated["accuracy"] / evaluated["tokens"] - on_one["accuracy"]) < 1e-10


def regional(mean):
    """A loss with the user's own `shard_map`, which subtracts the mean over the batch from each row."""
    batch_axes = ("replica", "data", "fsdp")

    def centred(x):
        rows = jax.sharding.PartitionSpec(batch_axes)
        return jax.shard_map(lambda x: x - mean(x, batch_axes), in_specs=rows, out_specs=rows)(x)

    def loss(params, batch, key):
        return nll(centred(batch["x"]) @ params["w"], batch["y"]).mean()

    def init(key):
        return {"w": jax.random.normal(key, (WIDTH, VOCAB))}

    mesh = MeshLayout(data=2, fsdp=2, tensor=2)
    rules = AxisRules(preset=("fsdp", "megatron"))
    return training(init, loss, optax.sgd(0.1), numbers(0), mesh=mesh, rules=rules, dims={"w": ("embed", "vocab")})


def test_a_users_own_region_is_verified():
    proof = verify(regional(lambda x, axes: lax.pmean(x.mean(0), axes)), [numbers(1), numbers(2)])
    assert proof.is_equal, str(proof)


def test_planted_a_users_own_region_without_its_mean_over_devices_is_seen():
    proof = verify(regional(lambda x, axes: x.mean(0)), [numbers(1), numbers(2)])
    assert [row.name for row in proof.culprits] == ["data=2", "fsdp=2"]


ALONE = {
    "stages": ({"pipe": 2, "data": 2}, {"pipeline": {"kind": "1f1b", "num_microbatches": 2}}),
    "slices": ({"replica": 2, "data": 2}, {"local": {"axis": "replica", "every": 2, "outer": "average"}}),
}


@pytest.mark.parametrize("name", ALONE)
def test_stages_and_slices_have_gradients_of_their_own_in_a_users_region(name):
    """What a `shard_map` computes differs over an axis of which it knows nothing."""
    sizes, parallel = ALONE[name]
    layout = MeshLayout(**sizes)

    def init(key):
        return {"layers": jax.random.normal(key, (4, WIDTH, WIDTH)) / 4, "head": jnp.eye(WIDTH)}

    def trained(nonlinear):
        def loss(params, batch, key):
            x = batch["x"].astype(params["head"].dtype)
            x, _ = lax.scan(lambda x, w: (nonlinear(x @ w), None), x, params["layers"])
            return jnp.square(x @ params["head"]).mean()

        made = training(
            init, loss, optax.sgd(0.1), {"x": numbers(0)["x"]}, mesh=layout.build(jax.devices()[:4]), num_steps=2,
            rules=AxisRules(preset="pipeline", unnamed=(), batch=("replica", "data")), compute_dtype="float64",
            dims={"layers": ("layers", None, None)}, parallel=Parallel(**parallel),
        )  # fmt: skip
        state = made.compile_init(QUICK)()
        step = made.compile_step()
        for seed in range(2):
            state, _ = step(state, made.put({"x": numbers(seed)["x"]}))
        return jax.device_get(state.params)

    rows = jax.sharding.PartitionSpec("data")
    region = trained(lambda x: jax.shard_map(jnp.tanh, in_specs=rows, out_specs=rows)(x))
    assert largest_difference(region, trained(jnp.tanh)) < 1e-10


# Planted faults ----------------------------------------------------------------------------------------------------


def test_planted_batch_statistics_that_are_not_carried_are_seen(monkeypatch):
    on_one_device("conv_net")
    update = Update.__call__

    def stale(self, state, *args):
        new, metrics = update(self, state, *args)
        return replace(new, carried=state.carried), metrics

    monkeypatch.setattr(Update, "__call__", stale)
    found = first_difference("conv_net", trained("conv_net", "data8")[1])
    assert (found.step, found.kind) == (1, "carried")


def test_planted_a_frozen_parameter_that_is_trained_is_seen(monkeypatch):
    on_one_device("transformer")
    monkeypatch.setattr(optax, "set_to_zero", lambda: optax.sgd(1e-3))
    found = first_difference("transformer", trained("transformer", "data8")[1])
    assert (found.kind, found.path) == ("parameters", "Embed_0.embedding")


def test_planted_random_keys_that_change_while_carried_are_seen(monkeypatch):
    on_one_device("regularized")
    as_data = losses.as_data

    def other_key(x):
        return x + 1 if getattr(x, "dtype", None) == "uint32" and x.shape else x

    for module in (losses, specs):
        monkeypatch.setattr(module, "as_data", lambda tree: jax.tree.map(other_key, as_data(tree)))
    assert first_difference("regularized", trained("regularized", "data8")[1]).kind == "loss"


def test_planted_an_optimizer_that_gets_other_gradients_is_seen(monkeypatch):
    on_one_device("sam")
    for_line_search = step.for_line_search

    def halved(elsewhere):
        given = for_line_search(elsewhere)
        return given | {"grad_fn": lambda *args: jax.tree.map(lambda g: g / 2, given["grad_fn"](*args))}

    monkeypatch.setattr(step, "for_line_search", halved)
    assert first_difference("sam", trained("sam", "data8")[1]).kind == "parameters"


def test_planted_a_key_that_depends_on_the_mesh_is_seen(monkeypatch):
    on_one_device("mlp")
    monkeypatch.setattr(
        "meshpar.interop.training.step_key", lambda seed, step: jax.random.fold_in(jax.random.key(seed), step + 8)
    )
    assert first_difference("mlp", trained("mlp", "data8")[1]).kind == "loss"
