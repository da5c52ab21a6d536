"""Local updates equal plain loops over slices on one device, whatever the layout inside of a slice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.checkpoint.checkpoints import checkpoints
from meshpar.checkpoint.saved import find
from meshpar.data import Synthetic
from meshpar.errors import CheckpointError
from meshpar.experiment.config import Precision, Run
from meshpar.experiment.prepare import Prepared, prepare
from meshpar.mesh.layout import MeshLayout
from meshpar.models import Llama
from meshpar.optim import SGD, AdamW
from meshpar.optim.base import Descent
from meshpar.parallel.rounds import Rounds
from meshpar.sharding.rules import AxisRules
from meshpar.train.begin import Beginning
from meshpar.train.error_feedback import SLICES
from meshpar.train.fragments import Fragment
from meshpar.train.local_step import LocalStep
from meshpar.train.program import compile_program, with_rows
from meshpar.train.slices import Slices
from meshpar.train.state import TrainState
from meshpar.tree import flatten_with_paths
from meshpar.verification.trial import QUICK

MODEL = Llama(num_layers=2, hidden_size=16, num_heads=4, intermediate_size=32, vocab_size=32)
ROWS = 16
SEQ = 8
EVERY = 2
NUM_STEPS = 3 * EVERY
ENDS = (2, 4, 6)
LR = 2**-6  # exact in float32, the dtype of learning rates
CLIP = 0.5
Arrays = dict[str, np.ndarray]
LAYOUTS: dict[str, tuple[dict[str, int], list[str]]] = {
    "zero3_tensor": ({"replica": 2, "fsdp": 2, "tensor": 2}, ["fsdp", "megatron"]),
    "zero1": ({"replica": 4, "fsdp": 2}, ["zero1"]),
    "zero2_data": ({"replica": 2, "data": 2, "fsdp": 2}, ["zero2"]),
    "tensor_sp": ({"replica": 2, "tensor": 4}, ["megatron_sp"]),
    "zero1_two": ({"replica": 2, "fsdp": 4}, ["zero1"]),
    "four": ({"replica": 4, "tensor": 2}, ["megatron"]),
    "pipeline": ({"replica": 2, "pipe": 2, "tensor": 2}, ["pipeline", "megatron"]),
    "one": ({}, ["replicated"]),
}


class Momentum:
    """The heavy ball, or Nesterov's momentum, in NumPy."""

    def __init__(self, decay: float, nesterov: bool):
        self.decay = decay
        self.nesterov = nesterov
        self.trace: Arrays = {}

    def __call__(self, grads: Arrays) -> Arrays:
        self.trace = {name: g + self.decay * self.trace.get(name, 0.0) for name, g in grads.items()}
        if not self.nesterov:
            return self.trace
        return {name: g + self.decay * self.trace[name] for name, g in grads.items()}


class Adam:
    """Adam's direction in NumPy."""

    def __init__(self, b1: float, b2: float, eps: float):
        self.decays = (b1, b2)
        self.eps = eps
        self.count = 0
        self.mean: Arrays = {}
        self.square: Arrays = {}

    def __call__(self, grads: Arrays) -> Arrays:
        b1, b2 = self.decays
        self.count += 1
        self.mean = {name: b1 * self.mean.get(name, 0.0) + (1 - b1) * g for name, g in grads.items()}
        self.square = {name: b2 * self.square.get(name, 0.0) + (1 - b2) * g**2 for name, g in grads.items()}
        means = {name: m / (1 - b1**self.count) for name, m in self.mean.items()}
        roots = {name: np.sqrt(v / (1 - b2**self.count)) for name, v in self.square.items()}
        return {name: means[name] / (roots[name] + self.eps) for name in grads}


INNER: dict[str, tuple[Descent, Callable[[], Any]]] = {
    "sgd": (SGD(lr=LR, clip_norm=CLIP), lambda: Momentum(0.9, False)),
    "adamw": (AdamW(lr=LR, clip_norm=CLIP, weight_decay=0.0), lambda: Adam(0.9, 0.95, 1e-8)),
}
OUTER: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "average": ({"kind": "average", "lr": 1.0}, lambda: Momentum(0.0, False)),
    "nesterov": ({"kind": "nesterov", "lr": 0.7}, lambda: Momentum(0.9, True)),
    "adam": ({"kind": "adam", "lr": 0.3}, lambda: Adam(0.9, 0.95, 0.1)),
}


def prepared(
    layout: str, optim: Descent, local: dict[str, Any] | None = None, rows: int = ROWS, num_steps: int = NUM_STEPS
) -> Prepared:
    sizes, presets = LAYOUTS[layout]
    pipeline = {"kind": "1f1b", "num_microbatches": 2} if "pipe" in sizes else None
    run = Run(
        model=MODEL,
        data=Synthetic(batch_size=rows, seq_len=SEQ, vocab_size=32),
        optim=optim,
        mesh=MeshLayout(**sizes),
        rules=AxisRules(preset=tuple(presets)),
        precision=Precision(params="float64", compute="float64"),
        parallel={"local": local, "pipeline": pipeline},
        num_steps=num_steps,
        run_dir="unused",
    )
    return prepare(run, run.mesh.build(jax.devices()[: run.mesh.requested()]))


def batches(counts_all: bool = False, num_steps: int = NUM_STEPS) -> list[dict[str, np.ndarray]]:
    """Random tokens. Unless `counts_all`, more targets of later rows do not count: slices have different numbers."""
    rng = np.random.default_rng(0)
    segments = np.ones((ROWS, SEQ), np.int32)
    same = {"segments": segments, "positions": segments * np.arange(SEQ, dtype=np.int32)}
    drawn = []
    for _ in range(num_steps):
        targets = rng.integers(0, 32, (ROWS, SEQ))
        if not counts_all:
            targets[rng.random((ROWS, SEQ)) < np.linspace(0, 0.8, ROWS)[:, None]] = -1
        tokens = rng.integers(0, 32, (ROWS, SEQ))
        drawn.append({"tokens": tokens.astype(np.int32), "targets": targets.astype(np.int32)} | same)
    return drawn


@dataclass
class Outcome:
    """The losses of slices [steps, slices], the shared parameters, and those of slices [slices, ...]."""

    losses: list[Any] = field(default_factory=list)
    shared: Arrays = field(default_factory=dict)
    own: Arrays = field(default_factory=dict)

    def difference(self, other: Outcome) -> float:
        pairs = [(np.array(self.losses), np.array(other.losses))]
        pairs += [(self.shared[name], other.shared[name]) for name in self.shared]
        pairs += [(self.own[name], other.own[name]) for name in self.own]
        return max(np.abs(a - b).max() for a, b in pairs)


def outcome(run: Prepared, step: Any, state: TrainState, counts_all: bool = False) -> Outcome:
    """Trains; without local updates every loss and parameter is that of all slices."""
    found = Outcome()
    for index, batch in enumerate(batches(counts_all, run.run.num_steps), 1):
        state, metrics = step.at(index)(state, run.put(batch))
        found.losses.append(jax.device_get(metrics["loss"]))
    params = jax.device_get(state.params)
    own = jax.device_get(state.carried[SLICES]["params"]) if state.carried else {}
    return replace(found, shared=flatten_with_paths(params), own=flatten_with_paths(own))


@cache
def one_device(rows: int) -> tuple[Callable[..., Any], Any]:
    """(params, batch of so many rows) -> its gradients on one device; and the first parameters."""
    run = prepared("one", INNER["sgd"][0], rows=rows)
    compute = jax.jit(lambda params, batch: run.gradients(params, with_rows(batch), jnp.int32(0), {}))
    return compute, jax.device_get(run.compile_init(QUICK)().params)


def clipped(grads: Arrays) -> Arrays:
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    return {name: g * min(1.0, CLIP / norm) for name, g in grads.items()}


def quickly(run: Prepared, counts_all: bool = False) -> Outcome:
    return outcome(run, run.compile_step(QUICK), run.compile_init(QUICK)(), counts_all)


@cache
def reference(
    num_slices: int, inner: str, outer: str, start: int = 0, ends: tuple[int, ...] = ENDS, fragments: int = 1,
    overlap: int = 0, rates: tuple[float, ...] = (),
) -> Outcome:  # fmt: skip
    """The loop of the papers: each slice takes its steps alone, then the outer optimizer steps.

    With fragments each has an outer optimizer of its own, and their rounds end in turn.

    Args:
      start: the steps before the first round.
      ends: the last steps of the rounds.
      overlap: steps from the end of a round to its outer step. Slices then mix the new parameters with their own.
      rates: the learning rate of each step. Default: `LR`.
    """
    compute, first = one_device(ROWS // num_slices)
    tree = jax.tree.structure(first)
    names = list(flatten_with_paths(first))
    shared = dict(flatten_with_paths(first))
    settings, make_outer = OUTER[outer]
    outer_directions = [make_outer() for _ in range(fragments)]
    directions = [INNER[inner][1]() for _ in range(num_slices)]
    own = [shared] * num_slices
    own_weight = 0.5 if overlap else 0.0
    sent: dict[int, tuple[int, Arrays]] = {}
    found = Outcome()
    for index, batch in enumerate(batches(num_steps=ends[-1] + overlap), 1):
        rows = [{k: np.split(x, num_slices)[s] for k, x in batch.items()} for s in range(num_slices)]
        got = [
            jax.device_get(compute(tree.unflatten([p[n] for n in names]), b)) for p, b in zip(own, rows, strict=True)
        ]
        grads = [flatten_with_paths(one.grads) for one in got]
        losses = [one.loss for one in got]
        if index <= start:
            weights = np.array([one.tokens for one in got]) / sum(one.tokens for one in got)
            mean = {n: sum(w * g[n] for w, g in zip(weights, grads, strict=True)) for n in names}
            grads = [mean] * num_slices
            losses = [np.dot(weights, losses)] * num_slices
        found.losses.append(losses)
        steps = [d(clipped(g)) for d, g in zip(directions, grads, strict=True)]
        rate = rates[index - 1] if rates else LR
        own = [{n: p[n] - rate * s[n] for n in names} for p, s in zip(own, steps, strict=True)]
        if index <= start:
            shared = own[0]
        if index in ends:
            at = ends.index(index) % fragments
            mean = {n: sum(shared[n] - p[n] for p in own) / num_slices for n in names}
            sent[index + overlap] = at, mean
        if index in sent:
            at, mean = sent[index]
            parts = {n: slice(at, None, fragments) if "blocks" in n else slice(None) for n in names}
            parts = {n: part for n, part in parts.items() if "blocks" in n or at == fragments - 1}
            moved = outer_directions[at]({n: mean[n][part] for n, part in parts.items()})
            shared = {n: x.copy() for n, x in shared.items()}
            own = [{n: x.copy() for n, x in p.items()} for p in own]
            for n, part in parts.items():
                shared[n][part] -= settings["lr"] * moved[n]
                for p in own:
                    p[n][part] = own_weight * p[n][part] + (1 - own_weight) * shared[n][part]
    return replace(found, shared=shared, own={n: np.stack([p[n] for p in own]) for n in names})


def local(outer: str, **settings: Any) -> dict[str, Any]:
    return {"every": EVERY, "outer": OUTER[outer][0]} | settings


CASES = [
    ("zero3_tensor", "sgd", "average", 0),
    ("zero1", "adamw", "adam", 0),
    ("zero2_data", "adamw", "nesterov", 0),
    ("tensor_sp", "sgd", "nesterov", 2),
    ("pipeline", "adamw", "nesterov", 0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "inner", "outer", "start"), CASES)
def test_three_rounds_equal_the_loop_of_the_paper(layout, inner, outer, start):
    run = prepared(layout, INNER[inner][0], local(outer, start=start))
    num_slices = LAYOUTS[layout][0]["replica"]
    assert quickly(run).difference(reference(num_slices, inner, outer, start, ENDS[start // EVERY :])) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "outer"), [("zero3_tensor", "adam"), ("zero1_two", "nesterov")])
def test_fragments_of_layers_in_turn_equal_the_loop_of_the_paper(layout, outer):
    run = prepared(layout, INNER["adamw"][0], local(outer, fragments=2))
    want = reference(2, "adamw", outer, ends=(1, 2, 3, 4, 5, 6), fragments=2)
    assert quickly(run).difference(want) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "outer"), [("zero3_tensor", "nesterov"), ("zero1_two", "adam")])
def test_overlapped_fragments_equal_the_loop_of_the_paper(layout, outer):
    """Three rounds of each of two fragments."""
    settings = local(outer, fragments=2, overlap_steps=2) | {"every": 4}
    run = prepared(layout, INNER["adamw"][0], settings, num_steps=14)
    want = reference(2, "adamw", outer, ends=(2, 4, 6, 8, 10, 12), fragments=2, overlap=2)
    assert quickly(run).difference(want) < 1e-10


@pytest.mark.slow
def test_rounds_that_grow_as_the_learning_rate_falls_equal_the_loop_of_the_paper():
    """Rounds that begin at 8/8, 7/8, 6/8, 5/8 and 3/8 of the learning rate: floor of its inverse square steps.

    Eighths are exact in float32, so that the compiled schedule cannot round them otherwise.
    """
    optim = SGD(lr=LR, clip_norm=CLIP, schedule={"kind": "linear"})
    run = prepared("zero3_tensor", optim, local("nesterov") | {"every": 1, "growth": LR}, num_steps=8)
    rates = tuple(LR * (8 - step) / 8 for step in range(8))
    assert quickly(run).difference(reference(2, "sgd", "nesterov", ends=(1, 2, 3, 5, 8), rates=rates)) < 1e-10


@pytest.mark.slow
def test_error_feedback_delays_differences_and_loses_none():
    """Two rounds of random differences: what is not applied is in the rounding errors of the slices, in float32."""
    run = prepared("zero3_tensor", INNER["sgd"][0], local("average", compress={"kind": "int8", "error_feedback": True}))
    (traced,) = run.slices.trace_outer()
    outer = compile_program(traced, QUICK)
    state = run.compile_init(QUICK)()
    placed = run.placement.structs.carried[SLICES]["params"]
    rng = np.random.default_rng(0)
    for _ in range(2):
        before = jax.device_get(state)
        own = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=(2, *x.shape)), before.params)
        carried = state.carried[SLICES] | {
            "params": jax.tree.map(lambda x, p: jax.device_put(x, p.sharding), own, placed)
        }
        state = outer(replace(state, carried={SLICES: carried}))
        after = jax.device_get(state)
        errors = [one.carried[SLICES]["rounding"]["lost"] for one in (before, after)]
        arrays = map(jax.tree.leaves, (before.params, after.params, own, *errors))
        for old, new, slices, lost_before, lost in zip(*arrays, strict=True):
            differences = (old - slices + lost_before).sum(0)
            assert np.abs(differences - 2 * (old - new) - lost.sum(0)).max() < 1e-6
            assert np.abs(lost.sum(0)).max() > 1e-5


@pytest.mark.slow
def test_averaging_after_each_step_of_sgd_equals_the_synchronous_step():
    optim = SGD(lr=LR, clip_norm=None)
    alone = quickly(prepared("zero3_tensor", optim, {"every": 1}), counts_all=True)
    together = quickly(prepared("zero3_tensor", optim), counts_all=True)
    assert np.abs(np.mean(alone.losses, axis=1) - together.losses).max() < 1e-10
    assert max(np.abs(alone.shared[name] - x).max() for name, x in together.shared.items()) < 1e-10


class DiLoCo(NamedTuple):
    """DiLoCo on two slices with ZeRO-3 and tensor parallelism inside, compiled once."""

    run: Prepared
    step: LocalStep
    start: Callable[[], TrainState]

    def trained(self, state: TrainState, first: int, last: int) -> TrainState:
        """The state after the steps from first to last."""
        for index in range(first, last + 1):
            state, _ = self.step.at(index)(state, self.run.put(batches()[index - 1]))
        return state


@pytest.fixture(scope="module")
def diloco() -> DiLoCo:
    with jax.enable_x64(True):
        run = prepared("zero3_tensor", INNER["adamw"][0], local("nesterov"))
        step = run.compile_step(QUICK)
        assert isinstance(step, LocalStep)
        return DiLoCo(run, step, run.compile_init(QUICK))


def test_three_rounds_of_diloco_equal_the_loop_of_the_paper(diloco):
    assert outcome(diloco.run, diloco.step, diloco.start()).difference(reference(2, "adamw", "nesterov")) < 1e-10


def test_control_an_outer_step_taken_twice_is_seen(diloco):
    (outer,) = diloco.step.outer
    twice = replace(diloco.step, outer=(lambda state: outer(outer(state)),))
    assert outcome(diloco.run, twice, diloco.start()).difference(reference(2, "adamw", "nesterov")) > 1e-4


def test_control_unequal_weights_of_slices_are_seen(diloco, monkeypatch):
    mean = Slices._mean_differences

    def unequal(self: Slices, fragment: Fragment, shared: Any, own: Any, step: jax.Array) -> Any:
        weights = jnp.linspace(0.5, 1.5, self.num)
        params = jax.tree.map(lambda x, y: x - weights.reshape(-1, *[1] * x.ndim) * (x - y), shared, own["params"])
        return mean(self, fragment, shared, own | {"params": params}, step)

    monkeypatch.setattr(Slices, "_mean_differences", unequal)
    (traced,) = diloco.run.slices.trace_outer()
    wrong = replace(diloco.step, outer=(compile_program(traced, QUICK),))
    assert outcome(diloco.run, wrong, diloco.start()).difference(reference(2, "adamw", "nesterov")) > 1e-4


def test_rounds_of_unequal_lengths_equal_the_loop_of_the_paper(diloco):
    uneven = replace(diloco.step, rounds=Rounds((1, 2, 4, 6)))
    found = outcome(diloco.run, uneven, diloco.start())
    assert found.difference(reference(2, "adamw", "nesterov", ends=(1, 2, 4, 6))) < 1e-10
    assert found.difference(reference(2, "adamw", "nesterov")) > 1e-4


def test_an_outer_step_after_overlapped_steps_equals_the_loop_of_the_paper():
    """Three rounds. The control applies the differences one step too early."""
    settings = local("nesterov", overlap_steps=2) | {"every": 3}
    run = prepared("zero3_tensor", INNER["adamw"][0], settings, num_steps=11)
    step = run.compile_step(QUICK)
    start = run.compile_init(QUICK)
    want = reference(2, "adamw", "nesterov", ends=(3, 6, 9), overlap=2)
    assert isinstance(step, LocalStep)
    assert outcome(run, step, start()).difference(want) < 1e-10
    early = replace(step, rounds=replace(step.rounds, overlap_steps=1))
    assert outcome(run, early, start()).difference(want) > 1e-4


def test_a_run_resumes_within_a_round_and_refuses_another_number_of_slices(diloco, tmp_path):
    uninterrupted = jax.device_get(diloco.trained(diloco.start(), 1, NUM_STEPS))
    with checkpoints(tmp_path) as saved:
        saved.save(3, diloco.trained(diloco.start(), 1, 3))
        saved.wait()
        restored = saved.restore(diloco.run.placement.structs)
        four = prepared("four", INNER["adamw"][0], local("nesterov"))
        with pytest.raises(CheckpointError, match=r"another state beside the same parameters.*init\.from_checkpoint"):
            saved.newest(four.placement.structs)
    resumed = jax.device_get(diloco.trained(restored, 4, NUM_STEPS))
    assert jax.tree.all(jax.tree.map(np.array_equal, resumed, uninterrupted))


def test_resizing_begins_each_slice_at_the_mean_of_the_saved_ones(diloco, tmp_path):
    """Within a round, so that slices differ."""
    state = diloco.trained(diloco.start(), 1, 3)
    with checkpoints(tmp_path) as saved:
        saved.save(3, state)
        saved.wait()
    before = jax.device_get(state)
    four = prepared("four", INNER["adamw"][0], local("nesterov", resize="average"))
    after = jax.device_get(Beginning(four, find(tmp_path)).state())
    of_four = replace(after, skipped=before.skipped, carried=before.carried)
    assert jax.tree.all(jax.tree.map(np.array_equal, of_four, before))
    pairs = zip(jax.tree.leaves(after.carried), jax.tree.leaves(before.carried), strict=True)
    assert all(new.shape[0] == 4 and np.abs(new - old.mean(0)).max() < 1e-15 for new, old in pairs)
    moved = flatten_with_paths(before.carried[SLICES]["params"])
    assert all(np.abs(x[0] - x[1]).max() > 1e-4 for x in moved.values())


@pytest.mark.slow
def test_a_run_with_another_number_of_slices_begins_at_the_shared_parameters(diloco, tmp_path):
    state = diloco.trained(diloco.start(), 1, NUM_STEPS)
    with checkpoints(tmp_path) as saved:
        saved.save(NUM_STEPS, state)
        saved.wait()
    four = prepared("four", INNER["adamw"][0], local("nesterov"))
    begun = jax.device_get(Beginning(four, find(tmp_path), ["params.**", "opt_state.**"]).state())
    before = jax.device_get(state)
    assert jax.tree.all(jax.tree.map(np.array_equal, begun.params, before.params))
    assert jax.tree.all(jax.tree.map(np.array_equal, begun.opt_state, before.opt_state))
    own = begun.carried[SLICES]["params"]
    assert jax.tree.all(jax.tree.map(lambda x, y: x.shape[0] == 4 and bool((x == y).all()), own, begun.params))
    assert begun.step == 0
