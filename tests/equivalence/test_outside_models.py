"""The theorem for models that know nothing of meshpar: what they compute does not depend on the mesh."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product

import jax
import optax
import pytest
from jax import lax

from meshpar import AxisRules, MeshLayout, prove, training
from meshpar.proof.compare import compare, without_gradient
from meshpar.proof.prove import _wide, _widened
from meshpar.proof.trial import Trial
from meshpar.train.step import Update
from tests.equivalence.outside import MODELS, VOCAB, WIDTH, nll, numbers

LAYOUTS = {
    "one": ({}, "replicated"),
    "data8": ({"data": 8}, "replicated"),
    "fsdp8": ({"fsdp": 8}, "fsdp"),
    "tensor4": ({"tensor": 4}, "megatron"),
    "data2_fsdp2_tensor2": ({"data": 2, "fsdp": 2, "tensor": 2}, ("fsdp", "megatron")),
}
EVERY = list(product(MODELS, list(LAYOUTS)[1:]))
# Each model on one axis, one after the other, and on three.
SAMPLE = {(model, list(LAYOUTS)[1 + i % 3]) for i, model in enumerate(MODELS)}
SAMPLE |= {(model, "data2_fsdp2_tensor2") for model in MODELS}
CASES = [pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.slow, id="-".join(case)) for case in EVERY]


@pytest.fixture(autouse=True)
def _precision(float64):
    with jax.numpy_dtype_promotion("standard"):
        yield


def trained(model, layout):
    """Three steps of it, in float64."""
    make, batch = MODELS[model]
    sizes, preset = LAYOUTS[layout]
    mesh = MeshLayout(**sizes)
    mesh = mesh.build(jax.devices()[: mesh.requested() or 1])
    trial = Trial(_widened(make(mesh, AxisRules(preset=preset))))
    return trial.run(trial.start(), [_wide(batch(seed)) for seed in (1, 2, 3)])


@lru_cache
def on_one_device(model):
    return trained(model, "one")[1]


def first_difference(model, taken):
    return compare(taken, on_one_device(model), without_gradient(on_one_device(model))).first


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_equal_to_one_device(model, layout):
    state, taken = trained(model, layout)
    assert first_difference(model, taken) is None
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(state.params)) or layout == "data8"


# What a loss of the user's own may do besides ----------------------------------------------------------------------


def metrics_of(mesh, **more):
    sizes, preset = LAYOUTS[mesh]
    layout = MeshLayout(**sizes)
    mesh = layout.build(jax.devices()[: layout.requested() or 1])
    mlp = MODELS["mlp"][0](mesh, AxisRules(preset=preset))
    trial = Trial(_widened(replace(mlp, key=None, **more)))
    batch = trial.training.put(_wide(numbers(1)))
    evaluated = trial.training.compile_evaluation()(trial.start().params, batch, {})
    _, metrics, _ = trial._step(trial.start(), batch)
    return jax.device_get(metrics), jax.device_get(evaluated)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_metrics_beside_the_loss_are_means_over_all_rows(num_microbatches):
    one, _ = metrics_of("one")
    here, evaluated = metrics_of("data2_fsdp2_tensor2", num_microbatches=num_microbatches)
    assert 0 < one["accuracy"] < 1
    assert abs(here["accuracy"] - one["accuracy"]) < 1e-10
    assert abs(evaluated["accuracy"] / evaluated["tokens"] - one["accuracy"]) < 1e-10


def regional(mean):
    """A loss with a `shard_map` of the user's own, of rows less their mean over the batch."""
    batch_axes = ("replica", "data", "fsdp")

    def centred(x):
        rows = jax.sharding.PartitionSpec(batch_axes)
        return jax.shard_map(lambda x: x - mean(x, batch_axes), in_specs=rows, out_specs=rows)(x)

    def loss(params, batch, key):
        return nll(centred(batch["x"]) @ params["w"], batch["y"]).mean()

    init = lambda key: {"w": jax.random.normal(key, (WIDTH, VOCAB))}
    mesh = MeshLayout(data=2, fsdp=2, tensor=2)
    rules = AxisRules(preset=("fsdp", "megatron"))
    return training(init, loss, optax.sgd(0.1), numbers(0), mesh=mesh, rules=rules, dims={"w": ("embed", "vocab")})


def test_a_users_own_region_is_proved():
    proof = prove(regional(lambda x, axes: lax.pmean(x.mean(0), axes)), [numbers(1), numbers(2)])
    assert proof.is_equal, str(proof)


def test_a_users_own_region_without_its_mean_over_devices_is_seen():
    proof = prove(regional(lambda x, axes: x.mean(0)), [numbers(1), numbers(2)])
    assert [row.name for row in proof.guilty] == ["data=2", "fsdp=2"]


# Planted faults ----------------------------------------------------------------------------------------------------


def test_batch_statistics_that_are_not_handed_on_are_seen(monkeypatch):
    on_one_device("conv_net")
    update = Update.__call__

    def stale(self, state, got, sharded):
        new, metrics = update(self, state, got, sharded)
        return replace(new, carried=state.carried), metrics

    monkeypatch.setattr(Update, "__call__", stale)
    found = first_difference("conv_net", trained("conv_net", "data8")[1])
    assert (found.step, found.kind) == (1, "carried")


def test_a_frozen_parameter_that_is_trained_is_seen(monkeypatch):
    on_one_device("transformer")
    monkeypatch.setattr(optax, "set_to_zero", lambda: optax.sgd(1e-3))
    found = first_difference("transformer", trained("transformer", "data8")[1])
    assert (found.kind, found.path) == ("parameters", "Embed_0.embedding")


def test_a_key_that_depends_on_the_mesh_is_seen(monkeypatch):
    on_one_device("mlp")
    monkeypatch.setattr("meshpar.adopt.step_key", lambda seed, step: jax.random.fold_in(jax.random.key(seed), step + 8))
    assert first_difference("mlp", trained("mlp", "data8")[1]).kind == "loss"
