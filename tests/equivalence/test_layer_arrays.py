"""A state has an array for each layer between steps that compute layers without a loop, on CPUs."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from meshpar.checkpoint.checkpoints import checkpoints
from meshpar.errors import CheckpointError
from meshpar.experiment.prepare import prepare
from meshpar.nn.experts import Experts
from meshpar.optim import Adafactor, AdamW
from meshpar.verification.trial import QUICK
from tests.equivalence.conftest import batches, prepared

LAYERS = 3
EXPERTS = Experts(num=4, per_token=2, intermediate_size=8, balance="loss")


def unrolled(layout="zero3", model="llama", **fields):
    return prepared(model, layout, "manual", 1, fields={"unroll": "all", "num_layers": LAYERS} | fields)


def in_stacks(run):
    found = replace(run)
    vars(found)["layer_arrays"] = None
    return found


def shapes(tree):
    return {x.shape for x in jax.tree.leaves(tree)}


def sharding_of(x):
    return x.sharding


def equal(tree, other):
    return jax.tree.all(jax.tree.map(lambda x, y: bool((np.asarray(x) == np.asarray(y)).all()), tree, other))


def test_a_prepared_state_has_no_stack_and_a_finished_one_is_as_before(tmp_path):
    run = unrolled()
    layers = run.stored_layers
    state = run.compile_init(QUICK)()
    before = jax.device_get(state)
    prepared = layers.to_step(state)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params["blocks"]))
    assert not {shape for shape in shapes((prepared.params, prepared.opt_state)) if LAYERS in shape[:1]}
    placed = replace(run.on_prepared_states.placement.structs, is_prepared=True)
    assert jax.tree.map(sharding_of, prepared) == jax.tree.map(sharding_of, placed)
    with checkpoints(tmp_path) as saved, pytest.raises(CheckpointError, match=r"save step\.finish\(state\)"):
        saved.save(0, prepared)
    after = layers.to_model(prepared)
    assert jax.tree.map(sharding_of, after) == jax.tree.map(sharding_of, run.placement.structs)
    assert equal(before, after)


def test_layers_in_another_order_are_seen():
    run = unrolled()
    state = run.compile_init(QUICK)()
    before = jax.device_get(state)
    prepared = run.stored_layers.to_step(state)
    kernels = prepared.params["blocks"]["attn"]["q"]
    kernels["kernel"] = kernels["kernel"][::-1]
    assert not equal(before, run.stored_layers.to_model(prepared))


@pytest.mark.parametrize(
    "fields",
    [{}, pytest.param({"experts": EXPERTS, "num_layers": 2}, marks=pytest.mark.slow)],
    ids=["dense", "experts"],
)
def test_prepared_steps_compute_what_steps_of_stacks_do(fields):
    """Bit for bit but for rounding: XLA fuses the updates of single layers in other ways."""
    run = unrolled(**fields)
    outcomes = []
    for each in (run, in_stacks(run)):
        step = each.compile_step(QUICK)
        state = step.prepare(each.compile_init(QUICK)())
        for batch in batches():
            state, metrics = step(state, each.put(batch))
        assert state.is_prepared == (each is run)
        outcomes.append(jax.device_get((step.finish(state).params, metrics["loss"])))
    assert jax.tree.structure(outcomes[0]) == jax.tree.structure(outcomes[1])
    differences = jax.tree.map(lambda x, y: np.abs(x - y).max(), *outcomes)
    assert np.max(jax.tree.leaves(differences)) < 1e-12


def test_a_step_of_prepared_states_has_no_stack_of_layers():
    stacks = re.compile(rf"f64\[{LAYERS},")
    run = unrolled("data8")
    assert not stacks.search(run.compile_step().text)
    assert stacks.search(in_stacks(run).compile_step().text)


def test_layers_stay_in_stacks_where_something_else_reads_these():
    def has_own_arrays(**changes):
        return unrolled(**changes).layer_arrays is not None

    assert has_own_arrays()
    assert not has_own_arrays(unroll=1)
    assert not has_own_arrays(model="llama_frozen")
    assert has_own_arrays(experts=EXPERTS)
    assert not has_own_arrays(model="llama_experts")  # each step changes the load in the balance loss
    for optim in (Adafactor(lr=1e-2), AdamW(lr=1e-2, ema=0.9)):
        run = unrolled().run.model_copy(update={"optim": optim})
        assert prepare(run).layer_arrays is None
