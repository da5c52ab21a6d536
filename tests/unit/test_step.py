"""The compiled step: steps that are skipped, donation, clipping, precision, and every optimizer on shards."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.data import Synthetic
from meshpar.errors import RunError
from meshpar.experiment.config import Precision, Run
from meshpar.experiment.prepare import Prepared, prepare
from meshpar.mesh.layout import MeshLayout
from meshpar.models import Llama
from meshpar.optim import SGD, Adafactor, AdamW, Lion, Muon
from meshpar.sharding.rules import AxisRules
from meshpar.train.step import with_rows
from meshpar.tree import flatten_with_paths

MODEL = Llama(num_layers=2, hidden_size=16, num_heads=4, intermediate_size=32, vocab_size=32)
OPTIMIZERS = {"adamw": AdamW, "lion": Lion, "sgd": SGD, "adafactor": Adafactor, "muon": Muon}
COMPOSED = {"mesh": MeshLayout(data=2, fsdp=2, tensor=2), "rules": AxisRules(preset=("fsdp", "megatron"))}


def prepared(num_devices: int = 8, **changes) -> Prepared:
    fields = {
        "model": MODEL,
        "data": Synthetic(batch_size=8, seq_len=16, vocab_size=32),
        "optim": AdamW(lr=1e-2),
        "num_steps": 10,
        "run_dir": "unused",
    }
    run = Run(**fields | COMPOSED | changes)
    return prepare(run, run.mesh.build(jax.devices()[:num_devices]))


def batch_of(run: Prepared, index: int = 0):
    rows = run.run.data.train(0)[index]
    return {name: jax.device_put(x, run.batch[name].sharding) for name, x in rows.items()}


@lru_cache
def compiled():
    run = prepared()
    return run, run.compile_step(), run.compile_init()


def test_a_state_that_was_donated_is_refused_by_name():
    """On several CPU devices jax 0.10 ends in SIGSEGV."""
    run, step, init = compiled()
    state, batch = init(), batch_of(run)
    after, _ = step(state, batch)
    with pytest.raises(RunError, match=r"^step was donated .* `state, metrics = step\(state, batch\)`"):
        step(state, batch)
    with pytest.raises(RunError, match=r"^params\.blocks\.attn\.k\.kernel was donated to an earlier call"):
        step(replace(after, params=state.params), batch)
    assert int(step(after, batch)[0].step) == 2


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted():
    run, step, init = compiled()
    state = init()
    broken = state.params | {"head": state.params["head"] * jnp.nan}
    before = jax.device_get(broken)
    state, metrics = step(replace(state, params=broken), batch_of(run))
    assert (int(state.step), int(state.skipped), int(metrics["skipped"])) == (1, 1, 1)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))


def copied_arguments(text: str) -> list[str]:
    """The arrays of the state that the program copies before it overwrites them. Those of a fusion are `param_N`."""
    return re.findall(r"= f32\[\d\S* copy\(%(?:param\.|state)", text)


def test_the_update_copies_no_moment():
    run, step, _ = compiled()
    assert not copied_arguments(step.text)
    if jax.__version_info__ < (0, 11):  # control: without barriers, which later versions keep, the update has no order
        assert copied_arguments(run.compile_step({"xla_disable_hlo_passes": ""}).text)


def test_a_finite_step_changes_every_array_and_is_not_counted():
    run, step, init = compiled()
    before = jax.device_get(init().params)
    state, metrics = step(init(), batch_of(run))
    assert int(state.skipped) == 0
    assert int(metrics["tokens"]) == int((run.run.data.train(0)[0]["targets"] >= 0).sum())
    assert all((a != b).any() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True))


def test_the_state_is_donated():
    run, step, init = compiled()
    state = init()
    step(state, batch_of(run))
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))


def test_the_state_is_initialized_as_it_is_placed_and_no_device_holds_it_whole():
    run, _, init = compiled()
    state = init()
    for path, x in flatten_with_paths(state.params).items():
        placement = flatten_with_paths(run.placement.params)[path]
        assert x.sharding == placement.sharding
        assert {s.data.shape for s in x.addressable_shards} == {placement.local_shape}
    whole = sum(spec.num_bytes for spec in flatten_with_paths(run.specs).values())
    memory = init.func.compiled.memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 3 * whole  # parameters and two moments, whole


def test_initial_parameters_are_the_same_on_any_mesh():
    on_one_device = prepared(1, mesh=MeshLayout(), rules=AxisRules(preset="replicated")).compile_init()()
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(on_one_device.params), jax.device_get(compiled()[2]().params)
    )


def test_gradients_are_clipped_by_the_norm_of_the_whole():
    def moved(clip_norm):
        run = prepared(optim=SGD(lr=1.0, momentum=0.0, clip_norm=clip_norm, weight_decay=0.0))
        before = run.compile_init()()
        start = jax.device_get(before.params)
        after, metrics = run.compile_step()(before, batch_of(run))
        steps = jax.tree.map(lambda a, b: np.square(a - b).sum(), start, jax.device_get(after.params))
        return float(np.sqrt(sum(jax.tree.leaves(steps)))), float(metrics["grad_norm"])

    length, norm = moved(None)
    assert length == pytest.approx(norm, rel=1e-4)
    assert moved(norm / 4)[0] == pytest.approx(norm / 4, rel=1e-4)


def test_a_sharded_parameters_gradient_is_not_rounded_to_the_dtype_of_the_computation():
    """Otherwise each microbatch would add one rounding. (XLA's TPU compiler also aborts on the cast back and forth.)"""
    fsdp = {"mesh": MeshLayout(fsdp=8), "rules": AxisRules(preset=("fsdp",))}
    run = prepared(precision=Precision(compute="bfloat16"), **fsdp)
    got = jax.jit(lambda p, b: run.gradients(p, with_rows(b), 0, {}))(run.compile_init()().params, batch_of(run))
    sums = jax.tree.map(lambda g: np.asarray(g * got.tokens.astype(g.dtype)), got.grads)
    fine = {path: (g.astype(jnp.bfloat16) != g).mean() for path, g in flatten_with_paths(sums).items()}
    assert min(fine.values()) > 0.5, fine


def test_bfloat16_computes_near_float32_and_stores_float32():
    run = prepared(precision=Precision(compute="bfloat16"))
    state, metrics = run.compile_step()(run.compile_init()(), batch_of(run))
    _, want = compiled()[1](compiled()[2](), batch_of(compiled()[0]))
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {np.dtype("float32")}
    # bfloat16 has 8 significant bits: a logit of size 1 is off by 2^-9, and the mean of many nlls by less.
    assert float(metrics["loss"]) == pytest.approx(float(want["loss"]), abs=2**-7)


def test_the_evaluation_is_the_loss_of_the_step():
    run, step, init = compiled()
    sums = run.compile_evaluation()(init().params, batch_of(run), {})
    _, metrics = step(init(), batch_of(run))
    assert float(sums["loss"]) / int(sums["tokens"]) == pytest.approx(float(metrics["loss"]), rel=1e-5)


@pytest.mark.sample(3)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_computes_on_shards_what_it_computes_on_one_device(name):
    def after_two_steps(num_devices, **changes):
        float64 = Precision(params="float64", compute="float64")
        run = prepared(num_devices, optim=OPTIMIZERS[name](lr=1e-2), precision=float64, **changes)
        step = run.compile_step()
        state = run.compile_init()()
        for index in range(2):
            state, _ = step(state, batch_of(run, index))
        return jax.device_get(state)

    on_one_device = after_two_steps(1, mesh=MeshLayout(), rules=AxisRules(preset="replicated"))
    on_eight_devices = after_two_steps(8)
    for a, b in zip(jax.tree.leaves(on_one_device), jax.tree.leaves(on_eight_devices), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("rules", ["zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_is_sharded_as_its_parameters_and_never_whole(name, rules):
    """State as large as a parameter has the parameter's sharding; factored state is sharded by its own dims."""
    run = prepared(mesh=MeshLayout(fsdp=8), rules=AxisRules(preset=rules), optim=OPTIMIZERS[name](lr=1e-2))
    for path, placement in flatten_with_paths(run.placement.opt_state).items():
        if "embed" in placement.spec.dims:
            assert "fsdp" in {axis for axes in placement.axes for axis in axes}, path
        else:
            assert (
                placement.spec.num_bytes <= 4 * max(MODEL.padded_vocab, MODEL.intermediate_size) * MODEL.num_layers
            ), path
