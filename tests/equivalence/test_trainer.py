"""The trainer's settings of a step compute on every layout what they do on one device."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from meshpar.experiment.prepare import Prepared, prepare
from meshpar.experiment.validate import task_of
from meshpar.mesh.layout import MeshLayout
from meshpar.models import Llama
from meshpar.nn.describe import functional
from meshpar.optim import AdamW
from meshpar.optim.ema import averaged
from meshpar.optim.freeze import Freeze
from meshpar.parallel.batch import TEACHER
from meshpar.sharding.rules import AxisRules
from meshpar.train import loss
from meshpar.train.loss import Distill, LossConfig
from meshpar.train.step import Step
from meshpar.train.teacher import Teacher, unstaged
from meshpar.verification.trial import QUICK
from tests.comparison import largest_difference
from tests.equivalence.conftest import SIZES, batches, prepared
from tests.xla import DEFAULT_FUSIONS

MODEL = "llama"
LR = 1e-2
LARGER = Llama(**SIZES | {"num_layers": 3, "hidden_size": 24, "intermediate_size": 64})
SETTINGS: dict[str, dict[str, Any]] = {
    "ema": {"optim": AdamW(lr=LR, ema=0.7)},
    "loss": {"loss": LossConfig(label_smoothing=0.1, z_loss=1e-2)},
    "freeze": {"freeze": (Freeze(paths=("blocks.attn.**", "embedding"), until=2), Freeze(paths=("blocks.mlp.up.*",)))},
    "distill": {"distill": Distill(teacher="unused", temperature=2.0, weight=0.4)},
}
SETTINGS["all"] = {name: value for setting in SETTINGS.values() for name, value in setting.items()}
LAYOUTS = {
    "data2_fsdp2_tensor2": ("manual", 2, ("fsdp", "megatron_sp")),
    "tensor4": ("auto", 1, ("megatron",)),
    "zero1": ("manual", 1, ("zero1",)),
    "zero2": ("manual", 4, ("zero2",)),
    "tensor4_sp": ("manual", 4, ("megatron",)),
}
OTHERS = {
    "fsdp2_context2_tensor2": (None, {"fsdp": 2, "context": 2, "tensor": 2}, ("fsdp", "megatron_sp", "context")),
    "pipe2_fsdp2_tensor2": ("1f1b", {"pipe": 2, "fsdp": 2, "tensor": 2}, ("pipeline", "fsdp", "megatron_sp")),
    "pipe2_data2": ("gpipe", {"pipe": 2, "data": 2}, ("pipeline",)),
    "pipe2_zero2": ("zb_h1", {"pipe": 2, "fsdp": 4}, ("pipeline", "zero2")),
    "pipe2_zero1": ("1f1b", {"pipe": 2, "fsdp": 4}, ("pipeline", "zero1")),
}
IN_CI = [("all", "data2_fsdp2_tensor2"), ("all", "tensor4"), ("all", "pipe2_fsdp2_tensor2")]
CASES = [
    pytest.param(name, layout, marks=[] if (name, layout) in IN_CI else pytest.mark.slow)
    for name in SETTINGS
    for layout in [*LAYOUTS, *OTHERS]
]


def teaching(run: Prepared, rules: AxisRules) -> Teacher:
    """A teacher with random parameters, larger than its student, sharded by rules of its own."""
    model = nnx.eval_shape(lambda: LARGER.build(nnx.Rngs(0)))
    specs = jax.tree.map(lambda spec: replace(spec, dtype=np.dtype("float64")), larger().specs)
    forward = functional(model, "forward")
    return Teacher(forward, specs, rules, run.ctx, run.batch_specs, LARGER.padded_vocab, LARGER.hidden_size)


@lru_cache
def larger() -> Prepared:
    run = prepared(MODEL, None, "auto", 1).run
    return prepare(run.model_copy(update={"model": LARGER}), run.mesh.build(jax.devices()[:1]))


@lru_cache
def teachers_parameters() -> Any:
    return jax.device_get(larger().compile_init(QUICK)().params)


def plain(layout: str | None) -> tuple[Prepared, AxisRules]:
    """A run without these settings, and the rules of its teacher."""
    if layout in OTHERS:
        kind, sizes, presets = OTHERS[layout]
        rules = AxisRules(preset=presets)
        parallel = {"pipeline": {"kind": kind, "num_microbatches": 4}} if kind else {}
        run = prepared(MODEL, None, "manual", 1, mesh=MeshLayout(**sizes), rules=rules, parallel=parallel)
        return run, unstaged(rules)
    lowering, num_microbatches, presets = LAYOUTS[layout] if layout else ("auto", 1, ("replicated",))
    return prepared(MODEL, layout, lowering, num_microbatches), AxisRules(preset=presets)


def with_settings(name: str, layout: str | None, chunk: Any = "auto") -> Prepared:
    without, rules = plain(layout)
    changes = dict(SETTINGS[name])
    distill = changes.pop("distill", None)
    changes["loss"] = changes.get("loss", LossConfig()).model_copy(update={"chunk": chunk})
    run = prepare(without.run.model_copy(update=changes), without.mesh)
    if distill is None:
        return run
    program = run.run.model.program(replace(task_of(run.run), distill=distill))
    return replace(run, loss=program.loss, added=(teaching(run, rules),))


def given_its_teacher(run: Prepared) -> Step:
    # On one device two programs are compared bit for bit, which QUICK's fusions do not keep.
    step = run.compile_step(QUICK if run.mesh.size > 1 else DEFAULT_FUSIONS)
    if not run.added:
        return step

    def to(x, struct):
        return jax.device_put(x, struct.sharding)

    return replace(step, given={TEACHER: jax.tree.map(to, teachers_parameters(), run.given[TEACHER])})


def outcome(run: Prepared) -> dict[str, Any]:
    """Losses and norms of three steps; then the parameters, their average, and the average's loss."""
    step = given_its_teacher(run)
    state = run.compile_init(QUICK)()
    evaluate = run.compile_evaluation()
    steps = []
    for batch in batches():
        state, metrics = step(state, run.put(batch))
        steps.append((metrics["loss"], metrics["grad_norm"]))
    held_out = evaluate(averaged(state), run.put(batches()[0]), state.carried)
    found = {"steps": steps, "params": state.params, "average": averaged(state), "held_out": held_out["loss"]}
    return jax.device_get(found)


@lru_cache
def on_one_device(name: str) -> dict[str, Any]:
    return outcome(with_settings(name, None))


def difference(name: str, layout: str | None, chunk: Any = "auto") -> float:
    return largest_difference(outcome(with_settings(name, layout, chunk)), on_one_device(name))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_trainer_settings_are_equal_to_one_device(name, layout):
    assert difference(name, layout) < 1e-10


IN_CHUNKS = [None, "tensor4", "data2_fsdp2_tensor2", "fsdp2_context2_tensor2"]
IN_CHUNKS += [pytest.param(layout, marks=pytest.mark.slow) for layout in OTHERS if layout not in IN_CHUNKS]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", IN_CHUNKS)
def test_a_loss_in_chunks_is_equal_to_one_device(layout):
    """With label smoothing, z-loss and a teacher. The last chunk is shorter, and microbatches have chunks too."""
    assert difference("all", layout, chunk=20) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("layout", [None, "tensor4", "data2_fsdp2_tensor2", "pipe2_fsdp2_tensor2"])
def test_a_teacher_with_tied_embeddings_is_equal_to_one_device(layout, monkeypatch):
    monkeypatch.setitem(globals(), "LARGER", LARGER.model_copy(update={"tie_embeddings": True}))
    for name in ("larger", "teachers_parameters"):
        monkeypatch.setitem(globals(), name, lru_cache(globals()[name].__wrapped__))
    found = outcome(with_settings("distill", layout, chunk=20))
    want = outcome(with_settings("distill", None))
    assert largest_difference(found, want) < 1e-10


def test_a_planted_shard_of_a_teachers_head_is_seen(monkeypatch):
    """Control: a device multiplies by its neighbour's shard of the vocabulary."""
    on_one_device("all")
    product = loss.logits_of

    def shifted(hidden, head):
        return product(hidden, jax.lax.ppermute(head, "tensor", [(0, 1), (1, 0)]))

    monkeypatch.setattr(loss, "logits_of", shifted)
    assert difference("all", "data2_fsdp2_tensor2", chunk=20) > 1e-4


# Settings on one device, against their definitions ------------------------------------------------------------------


@lru_cache
def without_average() -> list[Any]:
    """The parameters before and after each step, with all settings but the average."""
    run = with_settings("all", None)
    plain = prepare(run.run.model_copy(update={"optim": AdamW(lr=LR)}), run.mesh)
    plain = replace(plain, loss=run.loss, added=run.added)
    step = given_its_teacher(plain)
    state = plain.compile_init(QUICK)()
    history = [jax.device_get(state.params)]
    for batch in batches():
        state, _ = step(state, plain.put(batch))
        history.append(jax.device_get(state.params))
    return history


def test_the_average_equals_numpys_and_does_not_change_the_training():
    found = on_one_device("all")
    _, *kept = without_average()
    weights = 0.7 ** np.arange(len(kept))[::-1]
    for path in ("head", "embedding"):
        np.testing.assert_array_equal(found["params"][path], kept[-1][path])
        want = np.average([params[path] for params in kept], axis=0, weights=weights)
        np.testing.assert_allclose(found["average"][path], want, rtol=0, atol=1e-12)


def test_a_frozen_parameter_keeps_its_value_until_its_step_and_then_starts_anew():
    first, *kept = without_average()

    def attn(params):
        return params["blocks"]["attn"]["q"]["kernel"]

    def up(params):
        return params["blocks"]["mlp"]["up"]["kernel"]

    assert all(np.array_equal(up(params), up(first)) for params in kept)
    assert [np.array_equal(attn(params), attn(first)) for params in kept] == [True, True, False]
    # Adam's first update has size lr, except where the gradient is as small as eps.
    moved = np.abs(attn(kept[2]) - attn(first) * (1 - LR * 0.1))
    assert np.quantile(moved, 0.01) > 0.99 * LR and moved.max() < LR * (1 + 1e-6)
