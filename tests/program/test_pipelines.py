"""The bytes, memory and FLOPs of a pipeline's compiled step, for every schedule and number of microbatches."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

import jax
import pytest

from meshpar.cost.traced import traffic
from meshpar.inspection.inspect import Inspection, inspect
from meshpar.inspection.program.hlo import collectives_of, total_sent_bytes
from meshpar.models import Llama
from meshpar.nn.experts import Balance, Experts
from meshpar.nn.lora import LoRA
from meshpar.nn.remat import Remat
from meshpar.optim.freeze import Freeze
from meshpar.parallel import scopes
from meshpar.parallel.pipeline import execute, split
from meshpar.parallel.pipeline.get_schedule import get_schedule
from meshpar.parallel.pipeline.schedule_table import in_ticks, tick_table
from meshpar.parallel.pipeline.simulate import simulate
from meshpar.partition import cutter
from meshpar.train.loss import LossConfig
from meshpar.train.stored_layers import LayerOrder
from tests.pipelines import MODELS, difference, prepared, scheduled
from tests.program.oracle import closed_form
from tests.program.test_bytes import as_written, cost_as_traced, cost_as_written, sent_over

SIZES = {"num_layers": 8, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64, "vocab_size": 64}


def run_of(kind, mesh, m, remat="none", **more):
    model = Llama(**SIZES, remat=remat)
    schedule = scheduled(kind, mesh, m, **more) if mesh else None
    return prepared(model, mesh, schedule, rows=4 * m, seq=32, precision="float32")


@lru_cache
def inspected(kind, mesh, m, remat="none") -> Inspection:
    run = run_of(kind, mesh, m, remat)
    return inspect(run.compile_step().compiled, run.mesh)


def temp_bytes(kind, mesh, m):
    return inspected(kind, mesh, m).memory.temporaries


def permutes(inspection: Inspection):
    return [collective for collective in inspection.collectives if collective.kind == "collective_permute"]


# Ticks -----------------------------------------------------------------------------------------------------------

TICKS = {  # in units of an operation on a chunk; where B is not split, its W follows at once
    "gpipe": lambda p, m, v: 3 * m + 2 * (p - 1),
    "1f1b": lambda p, m, v: 3 * m + 2 * (p - 1),
    "zb_h1": lambda p, m, v: 3 * m + p - 1,
    "zb_h2": lambda p, m, v: 3 * m + p - 1,
    "zbv": lambda p, m, v: 3 * m * v + p - 1,
    "interleaved": lambda p, m, v: 3 * m * v + 2 * (p - 1),
}


@pytest.mark.parametrize("kind", TICKS)
@pytest.mark.parametrize(("mesh", "m"), [("pipe2", 4), ("pipe4", 8), ("pipe4", 16), ("pipe8", 16)])
def test_the_ticks_of_a_step_equal_the_formula(kind, mesh, m):
    schedule = scheduled(kind, mesh, m)
    p = int(mesh[-1])
    assert in_ticks(schedule.orders(p), schedule).makespan == TICKS[kind](p, m, schedule.chunks_per_stage)


# Messages --------------------------------------------------------------------------------------------------------

MESSAGE = 4 * 32 * 32 * 4  # bytes of a microbatch of 4 rows of 32 tokens, 32 wide, in float32
SENDING = [
    ("1f1b", "pipe4", 8, {}),
    ("interleaved", "pipe4", 8, {}),
    ("zbv", "pipe4", 8, {}),
    ("1f1b", "pipe4", 3, {"cut": (1, 3, 2, 2)}),
    ("gpipe", "pipe4", 8, {}),
    ("zb_h1", "pipe4", 8, {}),
    ("zb_h2", "pipe4", 8, {}),
    ("pipedream_2bw", "pipe4", 4, {}),
    ("interleaved", "pipe2", 4, {"num_chunks": 4}),
    ("zbv", "pipe2", 3, {}),
    ("zb_h1", "pipe8", 8, {}),
]


def links(compiled, mesh):
    """(source, target) -> the number of messages that the ticks of a compiled program send."""
    sent = Counter()
    for collective in collectives_of(compiled, mesh):
        if collective.kind == "collective_permute" and "while" in collective.op_name:
            assert collective.full_bytes == MESSAGE
            sent.update(dict.fromkeys(collective.groups, collective.times))
    return sent


def needed(schedule, p, with_backward=True):
    """(source, target) -> the number of messages that the stages need, in any order of operations."""
    sent = Counter()
    for source, target in itertools.pairwise(schedule.stage_of(k, p) for k in range(p * schedule.chunks_per_stage)):
        if source != target:
            sent[source, target] += schedule.num_microbatches
            sent[target, source] += schedule.num_microbatches * with_backward
    return +sent


def sent_over_pipe(compiled, mesh, p, only_in_ticks=False):
    """Bytes that all stages of a compiled program send by permutes."""
    sent = [one for one in collectives_of(compiled, mesh) if "while" in one.op_name or not only_in_ticks]
    return p * total_sent_bytes(sent, "collective_permute", ["pipe"])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "mesh", "m", "more"),
    [pytest.param(*case, marks=pytest.mark.slow if i > 3 else []) for i, case in enumerate(SENDING)],
)
def test_the_bytes_over_pipe_equal_those_of_the_messages(kind, mesh, m, more):
    """For the step and for the evaluation, which has only forwards; compiled and traced.

    An evaluation moves layers, and so does a step with an uneven cut: these count only in the ticks.
    """
    run = run_of(kind, mesh, m, **more)
    p = int(mesh[-1])
    schedule = run.pipeline.schedule
    evaluation = run.compile_evaluation()
    step = as_written(run)
    for compiled, with_backward in [(step.compiled, True), (evaluation.compiled, False)]:
        messages = needed(schedule, p, with_backward)
        assert links(compiled, run.mesh) == messages
        only_in_ticks = not with_backward or "cut" in more
        assert sent_over_pipe(compiled, run.mesh, p, only_in_ticks) / (MESSAGE * messages.total()) == 1
    for program, traced in [(evaluation, traffic(run.collectives(evaluation.jaxpr))), (step, run.traced_bytes)]:
        assert sent_over(collectives_of(program.compiled, run.mesh))["pipe",] == traced["pipe",]
    assert run.traced_bytes == closed_form(run)


@pytest.mark.parametrize("kind", [pytest.param("interleaved", marks=pytest.mark.slow), "zbv"])
def test_planted_layers_that_move_in_each_step_are_seen(kind, monkeypatch):
    """The layers of the other stage, there, and their gradients back."""
    run = run_of(kind, "pipe2", 4)
    form = closed_form(run)
    monkeypatch.setattr(LayerOrder, "covers_state", False)
    run = run_of(kind, "pipe2", 4)
    layers = sum(p.spec.num_bytes for p in jax.tree.leaves(run.placement.params["blocks"]))
    assert run.traced_bytes["pipe",] - form["pipe",] == 2 * Fraction(layers, 2) / 2
    permuted = sent_over_pipe(as_written(run).compiled, run.mesh, 2)
    assert permuted == MESSAGE * needed(run.pipeline.schedule, 2).total() + layers


def test_planted_a_message_that_no_stage_needs_is_seen(monkeypatch):
    """No stage stores it, so only the number of bytes changes."""
    plan = execute.Pipeline.plan

    def with_one_more(self, ctx, forward_only=False):
        ticks, cut = plan(self, ctx, forward_only)
        assert ticks.patterns[0] == (((0, 1),),)
        return replace(ticks, patterns=((((0, 1), (2, 3)),), *ticks.patterns[1:])), cut

    run = run_of("1f1b", "pipe4", 8)
    form = closed_form(run)
    monkeypatch.setattr(execute.Pipeline, "plan", with_one_more)
    compiled = as_written(run).compiled
    count = run.pipeline.plan(run.ctx)[0].pattern_counts[0]
    messages = needed(run.pipeline.schedule, 4)
    assert links(compiled, run.mesh) == messages + Counter({(2, 3): count}) != messages
    assert run.traced_bytes["pipe",] - form["pipe",] == Fraction(count * MESSAGE, 4) > 0


@pytest.mark.slow
def test_planted_a_message_that_is_not_sent_is_seen(float64, monkeypatch):
    plan = execute.Pipeline.plan

    def with_one_less(self, ctx, forward_only=False):
        ticks, cut = plan(self, ctx, forward_only)
        assert ticks.patterns[0] == (((0, 1),),)
        return replace(ticks, patterns=((((3, 0),),), *ticks.patterns[1:])), cut

    run = prepared(MODELS["tied"](8), "pipe4", scheduled("1f1b", "pipe4", 4))
    monkeypatch.setattr(execute.Pipeline, "plan", with_one_less)
    assert difference(run, "tied", 8) > 1e-6


def test_planted_branches_that_all_count_as_taken_are_seen(monkeypatch):
    """They would without the counts in the scope of the switch."""

    def all_taken(*times, of, stages=1):
        return jax.named_scope(f"taken_{of}_of_{of}")

    for module in (scopes, execute):
        monkeypatch.setattr(module, "taken", all_taken)
    run = run_of("1f1b", "pipe4", 8)
    assert run.traced_bytes["pipe",] > 2 * closed_form(run)["pipe",]


@pytest.mark.parametrize(("kind", "rounds"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_a_tick_has_two_permutes_only_if_a_stage_receives_two_messages(kind, rounds):
    schedule = scheduled(kind, "pipe4", 8)
    table = tick_table(schedule.orders(4), schedule)
    assert table.num_rounds == rounds
    for pattern in table.patterns:
        sources = [source for pairs in pattern for source, _ in pairs]
        assert len(set(sources)) == len(sources)
        assert all(len({target for _, target in pairs}) == len(pairs) for pairs in pattern)


def test_an_even_cut_moves_no_layer():
    assert all("while" in collective.op_name for collective in permutes(inspected("1f1b", "pipe4", 8)))


def test_an_even_cut_with_padding_at_its_end_moves_no_layer(float64):
    run = prepared(MODELS["tied"](7, pad_layers_to_multiple=4), "pipe4", scheduled("1f1b", "pipe4", 4))
    assert run.pipeline.moves(run.ctx) == [None]
    assert run.pipeline.cut(run.ctx).layers.reshape(4, 2).tolist() == [[0, 1], [2, 3], [4, 5], [6, -1]]


# Bytes -----------------------------------------------------------------------------------------------------------

BYTES = [
    ("1f1b", "fsdp2_tensor2_sp", "llama", "none"),
    ("interleaved", "pipe4", "tied", "none"),
    ("zbv", "zero2_tensor2", "llama", "dots"),
    ("zb_h1", "fsdp4", "gpt", "full"),
    ("gpipe", "pipe2", "llama", "none"),
    ("zb_h1", "data2_tensor2", "llama", "none"),
    ("zb_h2", "zero1", "tied", "none"),
    ("1f1b", "hsdp", "llama", "full"),
    ("zbv", "fsdp4", "tied", "dots"),
    ("zb_h1", "fsdp4", "gpt", "dots_no_batch"),
    ("interleaved", "fsdp2_tensor2_sp", "gpt", "full"),
]


@pytest.mark.parametrize(
    ("kind", "mesh", "model", "remat"),
    [pytest.param(*case, marks=pytest.mark.slow if i else []) for i, case in enumerate(BYTES)],
)
def test_bytes_and_flops_of_a_pipeline_equal_the_traced_step(kind, mesh, model, remat):
    run = prepared(MODELS[model](8, remat=remat), mesh, scheduled(kind, mesh, 4), precision="float32")
    assert cost_as_written(run) == cost_as_traced(run)
    assert run.traced_bytes == closed_form(run)


def test_layers_add_their_auxiliary_losses_to_the_sums_of_their_stage(monkeypatch):
    """They send nothing for it. Control: as a part of the message they would."""

    def sent():
        experts = Experts(num=4, per_token=2, intermediate_size=8, balance=Balance(load="last_step"), z_loss=0.1)
        model = Llama(**SIZES | {"num_layers": 4}, experts=experts)
        mesh = ({"pipe": 2, "data": 2, "expert": 2}, ["pipeline", "experts"])
        run = prepared(model, mesh, get_schedule("1f1b", 2, 4), rows=16, seq=8, precision="float32")
        return run.traced_bytes, run.described_cut.rpartition(": ")[2], run.pipeline.schedule

    alone, drawn, schedule = sent()
    assert drawn == "f32[4,8,32]"
    message = 16 // 4 // 4 * 8 * 32 * 4
    assert alone["pipe",] == Fraction(message * needed(schedule, 2).total(), 2)
    monkeypatch.setattr(cutter, "added", lambda *of: None)
    along, drawn, _ = sent()
    assert drawn.startswith("f32[4,8,32], f32[")
    assert along["pipe",] > alone["pipe",]
    assert {axes: along[axes] for axes in along if axes != ("pipe",)} == {
        axes: alone[axes] for axes in alone if axes != ("pipe",)
    }


ADDED = {
    "loss": {"loss": LossConfig(label_smoothing=0.1, z_loss=1e-2)},
    "lora": {"lora": LoRA(rank=2, paths=("blocks.**",))},
    "frozen": {"freeze": (Freeze(paths=("embedding", "blocks.mlp.**")),)},
}


@pytest.mark.parametrize(
    ("name", "kind", "mesh"),
    [
        pytest.param(name, kind, mesh, marks=[] if (name, mesh) == ("lora", "zero2") else pytest.mark.slow)
        for name in ADDED
        for kind, mesh in [("1f1b", "fsdp4"), ("zb_h1", "zero2"), ("gpipe", "data2_tensor2"), ("zbv", "zero1")]
    ],
)
def test_bytes_and_flops_of_a_pipeline_with_trainer_settings_equal_the_traced_step(name, kind, mesh):
    run = prepared(MODELS["llama"](4), mesh, scheduled(kind, mesh, 4), precision="float32", **ADDED[name])
    assert cost_as_written(run) == cost_as_traced(run)
    assert run.traced_bytes == closed_form(run)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mesh", "cut"), [("1f1b", "fsdp2_tensor2_sp", None), ("zb_h1", "zero1", (3, 4))])
def test_bytes_and_flops_of_padded_layers_equal_the_traced_step(kind, mesh, cut):
    model = MODELS["llama"](7, pad_layers_to_multiple=2)
    run = prepared(model, mesh, scheduled(kind, mesh, 4, cut=cut), precision="float32")
    assert cost_as_written(run) == cost_as_traced(run)
    assert run.traced_bytes == closed_form(run)


@pytest.mark.slow
def test_bytes_and_flops_of_a_pipeline_with_accumulation_equal_the_traced_step():
    run = prepared(
        MODELS["tied"](8), "fsdp4", scheduled("interleaved", "fsdp4", 2), precision="float32", num_microbatches=3
    )
    assert cost_as_written(run) == cost_as_traced(run)
    assert run.traced_bytes == closed_form(run)


# Memory ----------------------------------------------------------------------------------------------------------


def test_the_memory_of_1f1b_does_not_grow_with_the_microbatches():
    assert temp_bytes("1f1b", "pipe4", 64) <= 1.02 * temp_bytes("1f1b", "pipe4", 8)


def test_1f1b_holds_what_one_layer_recomputes(monkeypatch):
    """Planted: W apart from B, for which a stage holds what all of its four layers recompute."""
    held = run_of("1f1b", "pipe2", 8, "full").compile_step().compiled.memory_analysis()
    plan = execute.Pipeline.plan

    def split_always(self, ctx, forward_only=False):
        ticks, cut = plan(self, ctx, forward_only)
        return replace(ticks, splits=True), cut

    monkeypatch.setattr(execute.Pipeline, "plan", split_always)
    planted = run_of("1f1b", "pipe2", 8, "full").compile_step().compiled.memory_analysis()
    assert held.temp_size_in_bytes < 0.5 * planted.temp_size_in_bytes


def test_the_memory_of_1f1b_is_a_fifth_of_that_of_gpipe():
    assert temp_bytes("1f1b", "pipe4", 64) <= 0.20 * temp_bytes("gpipe", "pipe4", 64)


@pytest.mark.slow
def test_control_the_memory_of_gpipe_grows_with_the_microbatches():
    assert temp_bytes("gpipe", "pipe4", 64) > 3 * temp_bytes("gpipe", "pipe4", 8)


# FLOPs -----------------------------------------------------------------------------------------------------------


def model_flops(m, remat):
    """FLOPs of a step on one device, whose backward is two forwards and what the remat policy recomputes."""
    run = run_of("", None, m, remat)
    return inspect(run.compile_step().compiled, run.mesh).flops


def stage_flops(whole, head, p):
    """FLOPs of the last stage, which has a p-th of the layers and the head."""
    return (whole - head) / p + head


HEAD = 3 * 2 * 32 * 64 * 4 * 32  # F, B and W of the output projection, for a microbatch of 4 rows


@pytest.mark.parametrize(
    ("kind", "remat"),
    [("zb_h1", "none")]
    + [
        pytest.param(kind, remat, marks=pytest.mark.slow)
        for kind in ("gpipe", "1f1b", "zb_h1", "zb_h2", "zbv", "interleaved")
        for remat in ("none", "dots", "full")
        if (kind, remat) != ("zb_h1", "none")
    ]
    + [pytest.param("zb_h1", Remat(save=("q", "k", "v", "attn", "gate")), marks=pytest.mark.slow)],
)
def test_the_flops_of_a_step_are_three_forwards_and_what_remat_recomputes(kind, remat):
    m = 8
    expected = stage_flops(model_flops(m, remat), m * HEAD, 4)
    assert expected <= inspected(kind, "pipe4", m, remat).flops <= 1.01 * expected


@pytest.mark.slow
def test_planted_a_w_that_recomputes_from_the_input_is_seen(monkeypatch):
    """W uses nothing that B has computed, as with two calls of `jax.vjp`."""
    needed = split._Cut._needed

    def from_scratch(self, targets, residuals, stash, made=()):
        return needed(self, targets, residuals, stash, set(self.cotangents) if made else ())

    monkeypatch.setattr(split._Cut, "_needed", from_scratch)
    run = run_of("zb_h1", "pipe4", 8)
    assert inspect(run.compile_step().compiled, run.mesh).flops > 1.2 * stage_flops(model_flops(8, "none"), 8 * HEAD, 4)


# Compile time ----------------------------------------------------------------------------------------------------


def test_the_length_of_the_program_does_not_depend_on_the_microbatches():
    few, many = (run_of("1f1b", "pipe4", m).compile_step().compiled.as_text() or "" for m in (8, 64))
    assert abs(len(many.splitlines()) / len(few.splitlines()) - 1) < 0.02


@pytest.mark.slow
def test_the_compile_time_does_not_depend_on_the_microbatches():
    def seconds(m):
        run = run_of("1f1b", "pipe4", m)
        jax.clear_caches()
        # Tracing is not timed, because the tests check the arguments of every function of the simulator.
        lowered = jax.jit(run.step).lower(run.placement.structs, run.batch)
        began = time.process_time()
        lowered.compile()
        return time.process_time() - began

    took = [(seconds(8), seconds(128)) for _ in range(3)]
    few, many = (min(times) for times in zip(*took, strict=True))
    assert many <= 1.05 * few


def test_the_simulated_makespan_is_in_units_of_ticks():
    schedule = scheduled("zb_h1", "pipe4", 8)
    assert simulate(schedule, 4).makespan == in_ticks(schedule.orders(4), schedule).makespan
