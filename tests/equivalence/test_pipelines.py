"""Every schedule, on every mesh, computes what one device computes: losses, gradients, norms and two updates."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import product

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from meshpar.checkpoint.checkpoints import checkpoints
from meshpar.checkpoint.retention import Retention
from meshpar.collectives.powersgd import PowerSGD
from meshpar.collectives.quantize import Int8
from meshpar.collectives.reduction import Reduce
from meshpar.errors import CheckpointError, ConfigError
from meshpar.experiment.actions import fit
from meshpar.experiment.config import Offload
from meshpar.models import Llama
from meshpar.optim import Adafactor, AdamW, Lion, Muon
from meshpar.parallel.pipeline import execute
from meshpar.parallel.pipeline.get_schedule import get_schedule
from meshpar.parallel.pipeline.partition import StagePartition
from meshpar.parallel.pipeline.schedule import Interleaved, ScheduleFile
from meshpar.parallel.pipeline.schedule_table import ScheduleTable
from meshpar.records.file import read
from meshpar.train.state import TrainState, shardings, structs
from meshpar.train.step import with_rows
from meshpar.train.stored_layers import LayerOrder
from meshpar.tree import flatten_with_paths
from meshpar.verification.trial import QUICK, Trial
from tests.comparison import largest_difference
from tests.pipelines import MODELS, VOCAB, batches, difference, on_one_device, prepared, scheduled
from tests.unit.test_pipeline_schedule import random_orders

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zbv"]
AROUND = ["data2_tensor2", "fsdp2_tensor2_sp", "fsdp4", "zero1", "zero2", "hsdp", "zero2_tensor2"]
COUNTS = {"pipe2": (2, 4, 3), "pipe4": (4, 8, 6), "pipe8": (8, 16, 12)}
ALONE = [
    (kind, mesh, m, model)
    for (kind, mesh), model in zip(product(SCHEDULES, COUNTS), ["tied", "llama", "gpt"] * 6, strict=True)
    for m in COUNTS[mesh]
    if not (kind == "interleaved" and m % int(mesh[-1]))
]
COMPOSED = [
    (kind, mesh, 4, model)
    for (kind, mesh), model in zip(product(SCHEDULES, AROUND), ["gpt", "tied", "llama"] * 14, strict=True)
]
SAMPLE = [
    ("1f1b", "data2_tensor2", 4, "tied"),
]
"""`test_pipelines_of_any_model.py` samples the other schedules: these models are cut in the same way."""
CASES = [
    pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.slow, id="-".join(map(str, case)))
    for case in dict.fromkeys(SAMPLE + ALONE + COMPOSED)
]


@pytest.fixture(autouse=True)
def _float64(float64):
    """Every test of this module computes in float64."""


def layers_for(kind, mesh):
    """At least one layer for each virtual stage."""
    return 16 if mesh == "pipe8" and kind in ("interleaved", "zbv") else 8


@pytest.mark.parametrize(("kind", "mesh", "num_microbatches", "model"), CASES)
def test_every_schedule_is_equal_to_one_device(kind, mesh, num_microbatches, model):
    layers = layers_for(kind, mesh)
    run = prepared(MODELS[model](layers), mesh, scheduled(kind, mesh, num_microbatches))
    assert difference(run, model, layers) < 1e-10


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "1f1b" else pytest.mark.slow) for kind in ("gpipe", "1f1b", "zb_h1")],
)
def test_padded_layers_on_four_stages_are_equal_to_one_device(kind):
    """Seven layers are stored in eight slots, the last of which holds zeros before and after the step."""
    run = prepared(MODELS["tied"](7, pad_layers_to_multiple=4), "pipe4", scheduled(kind, "pipe4", 6))
    assert difference(run, "tied", 7) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mesh", "multiple", "cut"),
    [
        ("1f1b", "pipe4", 8, (2, 1, 2, 2)),
        ("interleaved", "fsdp4", 2, None),
        ("zb_h2", "zero1", 2, None),
        ("1f1b", "zero2", 2, (3, 4)),
        ("zbv", "fsdp2_tensor2_sp", 2, None),
    ],
)
def test_padded_layers_on_any_mesh_with_any_cut_are_equal_to_one_device(kind, mesh, multiple, cut):
    model = MODELS["tied"](7, pad_layers_to_multiple=multiple)
    run = prepared(model, mesh, scheduled(kind, mesh, 4, cut=cut))
    assert difference(run, "tied", 7) < 1e-10


@pytest.mark.slow
def test_layers_that_every_stage_stores_are_equal_to_one_device():
    """Each stage stores all layers, and computes its own."""
    run = prepared(MODELS["tied"](7), "pipe4", scheduled("1f1b", "pipe4", 6), rules={"layers": ()})
    assert difference(run, "tied", 7) < 1e-10


SOME_EXPERTS = [
    ("first_dense", 6, "fsdp2_tensor2_sp", "1f1b", {}),
    ("every_second", 8, "pipe2", "1f1b", {}),
    ("first_dense", 5, "pipe2", "zb_h1", {"pad_layers_to_multiple": 2}),
    ("every_second", 8, "data2_tensor2", "interleaved", {}),
    ("first_dense", 6, "zero2", "zbv", {}),
]


@pytest.mark.parametrize(
    ("model", "layers", "mesh", "kind", "fields"),
    [pytest.param(*case, marks=pytest.mark.slow if i else []) for i, case in enumerate(SOME_EXPERTS)],
)
def test_stages_of_layers_some_of_which_have_experts_are_equal_to_one_device(model, layers, mesh, kind, fields):
    run = prepared(MODELS[model](layers, **fields), mesh, scheduled(kind, mesh, 4))
    assert difference(run, model, layers) < 1e-10


def test_layers_without_experts_in_several_loops_are_refused():
    with pytest.raises(ConfigError, match=r"model.experts\n    stages cut a stack that one loop computes"):
        prepared(MODELS["every_second"](7), "pipe2", scheduled("1f1b", "pipe2", 4), rules={"layers": ()})


CUTS = [
    ("zb_h1", "fsdp2_tensor2_sp", (3, 5)),
    ("gpipe", "pipe4", (3, 1, 2, 2)),
    ("1f1b", "pipe4", (1, 3, 2, 2)),
    ("1f1b", "fsdp4", (6, 2)),
    ("interleaved", "pipe4", (1, 1, 1, 1, 1, 1, 1, 1)),
    ("interleaved", "zero2_tensor2", (3, 1, 2, 2)),
    ("zb_h2", "hsdp", (1, 7)),
    ("zbv", "data2_tensor2", (3, 1, 2, 2)),
]


@pytest.mark.parametrize(
    ("kind", "mesh", "cut"), [pytest.param(*case, marks=pytest.mark.slow if i else []) for i, case in enumerate(CUTS)]
)
def test_a_given_cut_is_equal_to_one_device(kind, mesh, cut):
    """With collectives of other axes in the layers, which stages run a different number of times."""
    run = prepared(MODELS["tied"](8), mesh, scheduled(kind, mesh, 4, cut=cut))
    assert difference(run, "tied", 8) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", "dots_no_batch", "full", {"save": ["q", "k", "v", "attn", "gate"]}], ids=str)
@pytest.mark.parametrize("mesh", ["pipe4", "fsdp2_tensor2_sp"])
@pytest.mark.parametrize("kind", ["1f1b", "zb_h1"])
def test_remat_in_stages_is_equal_to_one_device(remat, mesh, kind):
    """Where the schedule does not split them, a layer's two gradients are computed at once."""
    run = prepared(MODELS["llama"](8, remat=remat), mesh, scheduled(kind, mesh, 4))
    assert difference(run, "llama", 8) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pipe4", "fsdp4", "zero2"])
def test_accumulation_around_a_pipeline_is_equal_to_one_device(mesh):
    run = prepared(MODELS["tied"](8), mesh, scheduled("1f1b", mesh, 2), num_microbatches=3)
    assert difference(run, "tied", 8) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mesh", "unroll", "at_once"),
    [("1f1b", "pipe2", "all", 4), ("zb_h1", "fsdp4", 3, 3), ("zbv", "zero2", "all", 2)],
)
def test_stages_without_a_loop_over_their_layers_are_equal_to_one_device(kind, mesh, unroll, at_once):
    run = prepared(MODELS["tied"](8, unroll=unroll), mesh, scheduled(kind, mesh, 4))
    loop = prepared(MODELS["tied"](8), mesh, scheduled(kind, mesh, 4))
    traced = [str(jax.make_jaxpr(of.on_prepared_states.step)(of.placement.structs, of.batch)) for of in (run, loop)]
    assert [f"unroll={at_once}" in program for program in traced] == [True, False]
    assert run.traced_bytes == loop.traced_bytes
    assert difference(run, "tied", 8) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["1f1b", "zbv"])
def test_an_offloaded_optimizer_is_equal_to_one_device(kind):
    """Its moments move to the schedule's order and back in the host's memory."""
    run = prepared(MODELS["tied"](8), "zero1", scheduled(kind, "zero1", 4), offload=Offload(optimizer="host"))
    state = run.compile_init(QUICK)()
    if run.layer_order:
        state = run.layer_order.to_step(state)
    assert state.opt_state[0].mu["blocks"]["attn"]["q"]["kernel"].sharding.memory_kind == "pinned_host"
    assert difference(run, "tied", 8) < 1e-10


def check_any_legal_order(data, folder):
    orders = random_orders(data, 2, 3)
    (folder / "orders.txt").write_text("\n".join(" ".join(map(str, order)) for order in orders))
    run = prepared(MODELS["tied"](8), "pipe2", ScheduleFile(num_microbatches=3, path=folder / "orders.txt"))
    assert difference(run, "tied", 8) < 1e-10


EXAMPLES = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.generate]}


@given(st.data())
@settings(max_examples=1, **EXAMPLES)
def test_a_random_legal_order_is_equal_to_one_device(tmp_path, data):
    check_any_legal_order(data, tmp_path)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=20, **EXAMPLES)
def test_twenty_random_legal_orders_are_equal_to_one_device(tmp_path, data):
    check_any_legal_order(data, tmp_path)


# Planted faults ------------------------------------------------------------------------------------------------


def faulty(monkeypatch):
    on_one_device("tied", 8)
    return prepared(MODELS["tied"](8), "pipe2", scheduled("1f1b", "pipe2", 4))


def test_planted_a_slot_too_few_is_seen(monkeypatch):
    run = faulty(monkeypatch)
    plan = execute.Pipeline.plan

    def fewer(self, ctx, forward_only=False):
        ticks, cut = plan(self, ctx, forward_only)
        return replace(ticks, rows=ticks.rows._replace(residual=np.zeros_like(ticks.rows.residual))), cut

    monkeypatch.setattr(execute.Pipeline, "plan", fewer)
    assert isinstance(run.pipeline.plan(run.ctx)[0], ScheduleTable)
    assert difference(run, "tied", 8) > 1e-6


def test_planted_layers_stored_in_another_order_than_the_cut_are_seen(monkeypatch):
    monkeypatch.setattr(StagePartition, "lies_in_order", lambda cut, stored: True)
    schedule = scheduled("1f1b", "pipe4", 6, cut=(2, 1, 2, 2))
    assert difference(prepared(MODELS["tied"](7, pad_layers_to_multiple=4), "pipe4", schedule), "tied", 7) > 1e-3


def test_planted_a_dropout_key_that_depends_on_the_stage_is_seen(monkeypatch):
    run = faulty(monkeypatch)
    init = execute._Stage.__init__

    def own_count(self, *args, **more):
        init(self, *args, **more)
        for stack in self.stacks:
            stack.indices = stack.indices - 4 * self.stage

    monkeypatch.setattr(execute._Stage, "__init__", own_count)
    assert difference(run, "tied", 8) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("layers", [pytest.param([-1, 1, 2], id="skipped"), pytest.param([0, 1, 1], id="twice")])
def test_planted_a_layer_that_a_stage_skips_or_runs_twice_is_seen(monkeypatch, layers):
    cut = np.array([[layers], [[3, -1, -1]]], np.int32)
    monkeypatch.setattr(execute, "cut_layers", lambda *_: StagePartition(cut))
    on_one_device("tied", 4)
    run = prepared(MODELS["tied"](4), "pipe2", scheduled("1f1b", "pipe2", 4, cut=(3, 1)))
    assert difference(run, "tied", 4) > 1e-3


@pytest.mark.slow
def test_planted_an_embedding_without_its_own_gradient_is_seen(monkeypatch):
    run = faulty(monkeypatch)
    monkeypatch.setattr(execute._Stage, "_embedding_gradient", lambda self, sums, dx, row: sums)
    assert difference(run, "tied", 8) > 1e-6


# Errors, evaluation, 2BW ---------------------------------------------------------------------------------------


def test_all_problems_of_a_schedule_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        prepared(MODELS["tied"](3), "pipe4", Interleaved(num_microbatches=6), rules={"layers": ()})
    assert "6 is not a multiple of the 4 stages, which interleaved needs" in str(error.value)
    either = "parallel.pipeline.num_microbatches=4 or parallel.pipeline.num_microbatches=8"
    assert f"{either}, or parallel.pipeline={{kind: 1f1b, num_microbatches: 6}}" in str(error.value)
    assert "3 layers cannot be cut into 8 parts (4 stages x 2 chunks)" in str(error.value)
    with pytest.raises(ConfigError, match="no schedule orders their work"):
        prepared(MODELS["tied"](8), "pipe4")
    with pytest.raises(ConfigError, match="GSPMD has no pipeline"):
        prepared(MODELS["tied"](8), "pipe4", scheduled("1f1b", "pipe4", 4), lowering="auto")


def test_the_initial_state_and_the_evaluation_in_stages_are_those_of_one_device():
    run = prepared(MODELS["tied"](8), "pipe2", scheduled("zbv", "pipe2", 4))
    on_one = prepared(MODELS["tied"](8), None)
    batch = next(iter(run.run.data.held_out()))

    def evaluated(prepared_run):
        state = prepared_run.compile_init(QUICK)()
        loss = prepared_run.compile_evaluation()(state.params, prepared_run.put(batch), {})
        return jax.device_get((state, loss))

    state, found = evaluated(run)
    expected_state, expected = evaluated(on_one)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-10), state, expected_state)
    assert found["tokens"] == expected["tokens"]
    assert abs(found["loss"] - expected["loss"]) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "num_microbatches"),
    [
        ("pipe2", 3), ("pipe4", 8), ("pipe8", 12), ("data2_tensor2", 4), ("fsdp2_tensor2_sp", 4), ("fsdp4", 4),
        ("zero1", 4),
    ],
)  # fmt: skip
def test_pipedream_2bw_takes_gradients_at_the_weights_before_the_last_update(mesh, num_microbatches):
    """On one device, by hand: w[t+1] = w[t] - update(gradient at w[t-1])."""
    run = prepared(MODELS["tied"](8), mesh, scheduled("pipedream_2bw", mesh, num_microbatches))
    on_one = prepared(MODELS["tied"](8), None)
    trial = Trial(run)
    drawn = [batches()[0], batches()[1], batches()[0]]
    _, results = trial.run(trial.start(), drawn)
    sharded = shardings(structs(on_one.placement.sharded))
    state = on_one.compile_init(QUICK)()
    before = state.params
    for batch, got in zip(drawn, results, strict=True):
        gradients = jax.jit(on_one.gradients)(before, with_rows(batch), state.step, {})
        before = state.params
        state, _ = jax.jit(lambda state, gradients: on_one.update(state, gradients, sharded))(state, gradients)
        assert abs(gradients.loss - got.loss["loss"]) < 1e-10
    params = flatten_with_paths(jax.device_get(state.params))
    assert max(abs(params[path] - value).max() for path, value in results[-1].parameters.items()) < 1e-10


# Layers between steps ------------------------------------------------------------------------------------------


def numbered(run, layers, in_schedule_order=False):
    """A state whose arrays have the number of a layer in its place, where layers are in this order; else zeros."""

    def numbers(placement):
        shape, dims = placement.spec.shape, placement.spec.dims
        others = tuple(dim for dim, name in enumerate(dims) if name != "layers")
        values = np.expand_dims(np.asarray(layers), others) if "layers" in dims else 0
        return jax.device_put(np.broadcast_to(values, shape).astype(placement.spec.dtype), placement.sharding)

    placed = run.placement
    trees = [jax.tree.map(numbers, tree) for tree in (placed.params, placed.opt_state, placed.carried)]
    zero = jax.device_put(np.int32(0), placed.structs.step.sharding)
    return TrainState(zero, *trees[:2], zero, trees[2], in_schedule_order)


def equal(state, other):
    return jax.tree.all(jax.tree.map(lambda x, y: bool((np.asarray(x) == np.asarray(y)).all()), state, other))


REDUCED = {"gradient_reduction": Reduce(across=Int8(error_feedback=True))}


def with_average_and_feedback(kind, mesh="data2_tensor2"):
    """A run with layers in parameters, two moments, an average, and error feedback, where they are the second dim."""
    schedule = scheduled(kind, mesh, 4)
    return prepared(MODELS["llama"](8), mesh, schedule, optim=AdamW(lr=1e-2, ema=0.9), parallel=REDUCED)


@pytest.mark.parametrize("kind", ["interleaved", "zbv"])
def test_every_array_of_layers_moves_to_the_stages_that_compute_with_them_and_back(kind, tmp_path):
    run = with_average_and_feedback(kind)
    order, dealt_out = run.layer_order, run.pipeline.cut(run.ctx).layers.reshape(-1)
    dims = run.placement.dims
    layered = {path for path in dims if "layers" in dims[path]}
    assert {path.split(".")[0] for path in layered} == {"params", "opt_state", "carried"}
    assert len(layered) == 5 * len(jax.tree.leaves(run.specs["blocks"]))
    state = order.to_step(numbered(run, range(8)))
    assert state.is_prepared and equal(state, numbered(run, dealt_out, in_schedule_order=True))
    with checkpoints(tmp_path) as saved, pytest.raises(CheckpointError, match=r"save step\.finish\(state\)"):
        saved.save(0, state)
    assert equal(order.to_model(state), numbered(run, range(8)))


def test_layers_that_move_to_the_stages_of_another_schedule_are_seen():
    run, other = with_average_and_feedback("zbv"), with_average_and_feedback("interleaved")
    astray = replace(run.layer_order, exchange=other.layer_order.exchange).to_step(numbered(run, range(8)))
    dealt_out = run.pipeline.cut(run.ctx).layers.reshape(-1)
    assert not equal(astray, numbered(run, dealt_out, in_schedule_order=True))


@pytest.mark.parametrize(
    ("num_heads", "more", "stays"),
    [
        (4, {"optim": Muon(lr=1e-2)}, True),
        (4, {"optim": Adafactor(lr=1e-2)}, True),
        (8, {"optim": Adafactor(lr=1e-2)}, False),
        (8, {"optim": Lion(lr=1e-2)}, True),
        (4, {"parallel": {"gradient_reduction": Reduce(across=PowerSGD(rank=2))}}, False),
        (4, {"rules": {"layers": ()}}, False),
    ],
    ids=["muon", "adafactor", "adafactor, 8 heads", "lion, 8 heads", "powersgd", "all layers on every stage"],
)
def test_layers_stay_where_it_is_known_which_dim_of_every_array_is_that_of_8_layers(num_heads, more, stays):
    """It is not that of a factored average if another dim has the same size, nor of flat error feedback."""
    model = Llama(num_layers=8, hidden_size=64, num_heads=num_heads, intermediate_size=128, vocab_size=32)
    run = prepared(model, "data2_tensor2", scheduled("zbv", "data2_tensor2", 4), **more)
    assert (run.layer_order is not None) == stays


def test_an_uneven_cut_moves_its_layers_in_each_step():
    model = MODELS["tied"](7, pad_layers_to_multiple=2)
    assert prepared(model, "pipe2", scheduled("zbv", "pipe2", 4)).layer_order is None


@pytest.mark.slow
def test_a_run_moves_its_layers_for_evaluations_and_checkpoints_only_and_another_schedule_continues_it(
    tmp_path, monkeypatch
):
    moves, seen, moved = [], [], LayerOrder._moved

    def noted(self, state, in_schedule_order):
        moves.append((int(jax.device_get(state.step)), in_schedule_order))
        return moved(self, state, in_schedule_order)

    monkeypatch.setattr(LayerOrder, "_moved", noted)

    def see(state, step):
        seen.append((step, state.is_prepared))
        return {}

    def trained(kind, folder):
        model = Llama(num_layers=4, hidden_size=8, num_heads=2, intermediate_size=8, vocab_size=VOCAB)
        run = prepared(model, ({"pipe": 2, "data": 4}, ["pipeline"]), get_schedule(kind, 2, 2), rows=8).run
        every = {"num_steps": 4, "log_every": 1, "eval_every": 2, "checkpoints": Retention(every=2)}
        state = fit(run.model_copy(update={"run_dir": folder} | every), json=True, callbacks=[see])
        records = [record for record in read(folder / "metrics.jsonl") if record["kind"] == "train"]
        return state, {record["step"]: record["loss"] for record in records}

    state, losses = trained("zbv", tmp_path / "zbv")
    assert moves == [(0, True), (2, False), (2, True), (4, False)]
    assert seen == [(2, False), (4, False)]
    shutil.copytree(tmp_path / "zbv" / "checkpoints" / "2", tmp_path / "1f1b" / "checkpoints" / "2")
    resumed, more = trained("1f1b", tmp_path / "1f1b")
    assert max(abs(more[step] - losses[step]) for step in (3, 4)) < 1e-10
    assert largest_difference(state, resumed) < 1e-10


def test_a_checkpoint_of_stages_is_restored_on_other_stages_or_none(tmp_path):
    """It is saved from interleaved stages."""
    trials = [
        Trial(prepared(MODELS["tied"](8), mesh, mesh and scheduled(kind, mesh, 4)))
        for mesh, kind in [("pipe4", "interleaved"), ("pipe2", "1f1b"), (None, "")]
    ]
    first, second = batches()
    state, _ = trials[0].run(trials[0].start(), [first])
    _, (continued,) = trials[0].run(state, [second])
    for other in trials[1:]:
        _, (resumed,) = other.run(trials[0].saved_and_restored(state, other), [second])
        assert abs(resumed.loss["loss"] - continued.loss["loss"]) < 1e-10
        assert max(abs(resumed.parameters[p] - v).max() for p, v in continued.parameters.items()) < 1e-10
