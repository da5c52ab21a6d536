"""The loop on a model of four numbers, on eight devices: what it records, saves, resumes, and does not hide."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshpar.checkpoint.checkpoints import checkpoints
from meshpar.checkpoint.retention import Retention
from meshpar.errors import RunError
from meshpar.records.file import read
from meshpar.records.loggers import Record
from meshpar.records.metrics import recorder
from meshpar.train import step as step_module
from meshpar.train.loop.loop import Loop
from meshpar.train.loop.stopwatch import Stopwatch
from meshpar.train.program import compile_program, trace
from meshpar.train.state import TrainState
from meshpar.train.step import IN_FLIGHT, Step
from tests.damage import with_flipped_bit

ROWS = 8
SEQ = 2


@dataclass
class Numbers:
    """A data set whose batch i depends on i alone. `interrupted` batches stop the run; `bad` ones have infinite losses.

    Args:
      length: how many batches one pass has.
    """

    length: int = 100
    interrupted: tuple[int, ...] = ()
    bad: tuple[int, ...] = ()
    closed: list[bool] = field(default_factory=list)

    def batches(self, start: int = 0, rows: Any = None) -> Iterator[dict[str, np.ndarray]]:
        try:
            for index in range(start, self.length):
                if index in self.interrupted:
                    raise KeyboardInterrupt
                yield self.batch(index)
        finally:
            self.closed.append(True)

    def batch(self, index: int) -> dict[str, np.ndarray]:
        tokens = np.random.default_rng(index).integers(0, 4, (ROWS, SEQ)).astype(np.int32)
        return {"tokens": tokens, "targets": np.full_like(tokens, -1 if index in self.bad else 3)}

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self.batches()


def loss_of(params: Any, batch: Any) -> jax.Array:
    """The sum over tokens of (w[token] - target)^2; infinite when a target is negative."""
    error = params["w"][batch["tokens"]] - batch["targets"].astype(jnp.float32)
    return jnp.sum(jnp.where(batch["targets"] < 0, jnp.inf, error**2))


def take_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    loss, grads = jax.value_and_grad(lambda params: loss_of(params, batch) / batch["tokens"].size)(state.params)
    finite = jnp.isfinite(loss)
    params = jax.tree.map(lambda p, g: jnp.where(finite, p - 0.5 * g, p), state.params, grads)
    skipped = state.skipped + jnp.where(finite, 0, 1).astype(jnp.int32)
    metrics = {"loss": loss, "tokens": jnp.int32(ROWS * SEQ), "skipped": skipped}
    return TrainState(state.step + 1, params, state.opt_state, skipped), metrics


@dataclass(frozen=True)
class Toy:
    step: Step
    evaluate: Callable[..., Any]
    structs: TrainState

    def state(self) -> TrainState:
        zeros = TrainState(jnp.int32(0), {"w": jnp.zeros(4)}, (), jnp.int32(0))
        return jax.tree.map(lambda x, struct: jax.device_put(x, struct.sharding), zeros, self.structs)


@cache
def toy() -> Toy:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec("data"))
    scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    structs = TrainState(scalar, {"w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=whole)}, (), scalar)
    batch = {name: jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32, sharding=rows) for name in ("tokens", "targets")}
    step = compile_program(trace(take_step, (structs, batch), whole, donate=(0,)))

    def evaluate(params: Any, batch: Any, carried: Any) -> Any:
        return {"loss": loss_of(params, batch), "tokens": jnp.int32(ROWS * SEQ)}

    compiled = jax.jit(evaluate, out_shardings=whole).lower(structs.params, batch, {}).compile()
    return Toy(Step(step, batch), compiled, structs)


def run(run_dir: Path, kept: Retention | None = None, **changed: Any) -> TrainState:
    """Runs the loop, or resumes it from the checkpoint in `run_dir`."""
    with recorder(run_dir, 10, as_json=True) as to, checkpoints(run_dir / "checkpoints", kept) as saved:
        settings: dict[str, Any] = {"num_steps": 10, "log_every": 4, "config": {"seed": 0}}
        parts: dict[str, Any] = {
            "train": Numbers(),
            "held_out": Numbers(length=3),
            "recorder": to,
            "checkpoints": saved,
        }
        new = Loop(step=toy().step, evaluate=toy().evaluate, **parts, **settings)
        state = toy().state() if saved.latest() is None else saved.restore(toy().structs)
        return replace(new, **changed).fit(state)


def test_a_wrong_copy_ends_the_run_which_then_resumes_from_before_it(tmp_path: Path):
    expected = run(tmp_path / "undisturbed").params["w"]
    settings: dict[str, Any] = {"check_replicas_every": 4, "eval_every": 1}

    def flip(state: TrainState, step: int) -> dict[str, float]:
        if step == 5:
            state.params["w"] = with_flipped_bit(state.params["w"], device=2, bit=20)
        return {}

    with pytest.raises(RunError, match=r"step 8: copies of the same state differ:\n  device 2 .*: params.w\n"):
        run(tmp_path, Retention(every=2), callbacks=[flip], **settings)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("[0-9]*")) == ["4", "6.damaged"]
    np.testing.assert_array_equal(run(tmp_path, Retention(every=2), **settings).params["w"], expected)


@pytest.mark.parametrize("num_steps", [10, 1])
def test_checks_run_once_after_the_record_of_the_first_step(tmp_path: Path, num_steps):
    seen = []
    run(tmp_path, num_steps=num_steps, after_first=lambda: seen.append(len(recorded(tmp_path, "train"))))
    assert seen == [1]


def test_the_speed_of_steps_does_not_contain_the_checks_after_the_first(tmp_path: Path):
    run(tmp_path, log_every=1, num_steps=2, after_first=lambda: time.sleep(1))
    assert recorded(tmp_path, "train")[1]["step_s"] < 0.5


def recorded(run_dir: Path, kind: str) -> list[Record]:
    return [record for record in read(run_dir / "metrics.jsonl") if record["kind"] == kind]


def steps_of(run_dir: Path, kind: str) -> list[int]:
    return [record["step"] for record in recorded(run_dir, kind)]


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir())


def test_records_evaluations_and_checkpoints_come_at_their_intervals(tmp_path: Path):
    state = run(tmp_path, eval_every=5, kept=Retention(every=3))
    assert state.step == 10
    assert steps_of(tmp_path, "train") == [1, 4, 8, 10]
    assert steps_of(tmp_path, "evaluation") == [5, 10]
    assert saved_steps(tmp_path) == [9, 10]


def test_a_run_ends_with_an_evaluation_and_a_checkpoint_by_default(tmp_path: Path):
    run(tmp_path)
    assert steps_of(tmp_path, "evaluation") == [10]
    assert saved_steps(tmp_path) == [10]


def test_a_run_learns_and_its_summary_says_so(tmp_path: Path):
    run(tmp_path)
    summary = recorded(tmp_path, "summary")[0]
    assert summary["first_loss"] == 9.0
    assert summary["held_out_loss"] < summary["last_loss"] < 1
    assert summary["lower_by"] == 1 - summary["held_out_loss"] / 9
    assert summary["tokens_per_s"] > 0 and summary["step_s"] > 0


def test_the_loss_on_held_out_data_is_the_mean_over_its_tokens(tmp_path: Path):
    state = run(tmp_path)
    w = np.asarray(state.params["w"], np.float64)
    tokens = np.stack([batch["tokens"] for batch in Numbers(length=3)])
    record = recorded(tmp_path, "evaluation")[-1]
    assert record["tokens"] == tokens.size
    np.testing.assert_allclose(record["loss"], np.mean((w[tokens] - 3) ** 2), rtol=1e-6)


def test_an_interrupted_run_resumes_to_the_same_numbers_bitwise(tmp_path: Path):
    unbroken = run(tmp_path / "unbroken", log_every=1)
    data = Numbers(interrupted=(7,))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", log_every=1, train=data, kept=Retention(every=4))
    assert data.closed == [True]
    assert saved_steps(tmp_path / "broken") == [4]
    resumed = run(tmp_path / "broken", log_every=1)
    np.testing.assert_array_equal(np.asarray(resumed.params["w"]), np.asarray(unbroken.params["w"]))
    for run_dir in (tmp_path / "unbroken", tmp_path / "broken"):
        assert steps_of(run_dir, "train") == list(range(1, 11))
    losses = [[r["loss"] for r in recorded(tmp_path / name, "train")] for name in ("unbroken", "broken")]
    assert losses[0] == losses[1]


def test_control_a_run_that_resumes_with_other_batches_has_other_numbers(tmp_path: Path):
    class FromTheStart(Numbers):
        def batches(self, start: int = 0, rows: Any = None) -> Iterator[dict[str, np.ndarray]]:
            return super().batches(0)

    unbroken = run(tmp_path / "unbroken")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", train=Numbers(interrupted=(7,)), kept=Retention(every=4))
    resumed = run(tmp_path / "broken", train=FromTheStart())
    assert not np.array_equal(np.asarray(resumed.params["w"]), np.asarray(unbroken.params["w"]))


def test_a_finished_run_only_repeats_its_summary(tmp_path: Path):
    first = run(tmp_path)
    data = Numbers(interrupted=(0,))
    again = run(tmp_path, train=data, held_out=data)
    np.testing.assert_array_equal(np.asarray(again.params["w"]), np.asarray(first.params["w"]))
    assert steps_of(tmp_path, "run") == [0, 10]
    first_summary, second_summary = recorded(tmp_path, "summary")
    assert first_summary == second_summary
    assert saved_steps(tmp_path) == [10]


def test_a_skipped_step_is_shown(tmp_path: Path):
    run(tmp_path, log_every=1, train=Numbers(bad=(4, 5)))
    skipped = {record["step"]: record["skipped"] for record in recorded(tmp_path, "train")}
    assert (skipped[4], skipped[5], skipped[6], skipped[10]) == (0, 1, 2, 2)


class InPlace:
    """The part of a step by which a state keeps its layers where they are, and all steps are the same."""

    def at(self, index: int) -> Any:
        return self

    def read(self, metrics: Any) -> Any:
        return jax.device_get(metrics)

    def prepare(self, state: TrainState) -> TrainState:
        return state

    def finish(self, state: TrainState) -> TrainState:
        return state


@dataclass(frozen=True)
class Watched(InPlace):
    """A step that stores the metrics of every call."""

    begun: list[Any] = field(default_factory=list)

    @property
    def order(self) -> None:
        """Rows keep their order."""

    @property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        return toy().step.batch

    def __call__(self, state: TrainState, batch: Any) -> Any:
        state, metrics = toy().step(state, batch)
        self.begun.append(metrics)
        return state, metrics


@dataclass(frozen=True)
class Careless(InPlace):
    """A step that lets JAX move the batch to the devices."""

    batch: dict[str, jax.ShapeDtypeStruct]
    order: None = None

    def __call__(self, state: TrainState, batch: Any) -> Any:
        return toy().step(state, {name: np.asarray(x) for name, x in batch.items()})


def test_control_an_implicit_transfer_raises(tmp_path: Path):
    with pytest.raises(Exception, match=r"Disallowed (host-to-device|device-to-host) transfer"):
        run(tmp_path, step=Careless(toy().step.batch))


def test_few_steps_are_in_flight_in_a_loop_that_reads_no_metrics(monkeypatch: pytest.MonkeyPatch):
    """JAX 0.10 hangs with more than about 32 steps whose metrics nobody has waited for."""
    assert in_flight(monkeypatch) == [IN_FLIGHT] * (40 - IN_FLIGHT)


def test_control_with_a_higher_limit_more_steps_are_in_flight(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_module, "IN_FLIGHT", 20)
    assert in_flight(monkeypatch) == [20] * 20


def in_flight(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of steps in flight, each time that a step has waited for another one."""
    step = replace(toy().step)
    wait = jax.block_until_ready
    begun = []
    counts = []

    def watched_wait(value: Any) -> Any:
        counts.extend(len(begun) - i for i, metrics in enumerate(begun) if metrics is value)
        return wait(value)

    monkeypatch.setattr("jax.block_until_ready", watched_wait)
    state = toy().state()
    shardings = {name: struct.sharding for name, struct in step.batch.items()}
    for batch in Numbers(length=40).batches():
        state, metrics = step(state, jax.device_put(batch, shardings))
        begun.append(metrics)
    return counts


def test_the_trace_has_three_steps_after_the_first_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    step = Watched()
    num_begun = []

    @contextmanager
    def trace(folder: str) -> Iterator[None]:
        num_begun.append(len(step.begun))
        yield
        num_begun.append(len(step.begun))

    monkeypatch.setattr("jax.profiler.trace", trace)
    run(tmp_path, step=step, profile=tmp_path / "profile")
    assert num_begun == [3, 6]


@pytest.mark.parametrize("num_steps", [1, 5, 10])
def test_a_trace_is_written_however_short_the_run(tmp_path: Path, num_steps: int):
    run(tmp_path, num_steps=num_steps, profile=tmp_path / "profile")
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1


def test_a_trace_that_is_interrupted_is_closed(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "first", train=Numbers(interrupted=(4,)), profile=tmp_path / "first" / "profile")
    run(tmp_path / "second", profile=tmp_path / "second" / "profile")


class Clock:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now_s = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now_s)

    def take(self, stopwatch: Stopwatch, num_steps: int) -> None:
        """Steps of 2 s and 10 tokens."""
        for _ in range(num_steps):
            self.now_s += 2
            stopwatch.count(jnp.int32(10))


def test_the_speed_of_a_lap_counts_its_steps_and_no_pauses(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    stopwatch = Stopwatch()
    clock.now_s = 1000
    clock.take(stopwatch, 1)
    assert stopwatch.lap() == {}
    clock.take(stopwatch, 3)
    with stopwatch.paused():
        clock.now_s += 500
    clock.take(stopwatch, 1)
    assert stopwatch.lap() == {"step_s": 2.0, "tokens_per_s": 5.0, "data_wait": 0.0}
    clock.take(stopwatch, 1)
    with stopwatch.waiting():
        clock.take(stopwatch, 1)
    assert stopwatch.lap() == {"step_s": 2.0, "tokens_per_s": 5.0, "data_wait": 0.5}
    clock.take(stopwatch, 1)
    assert stopwatch.lap()["data_wait"] == 0.0
    stopwatch.rows = 8
    clock.take(stopwatch, 2)
    assert stopwatch.lap() == {"step_s": 2.0, "rows_per_s": 4.0, "data_wait": 0.0}


@dataclass
class Late:
    """The tokens of a step that ends 4 s after it is waited for."""

    clock: Clock

    def block_until_ready(self) -> None:
        self.clock.now_s += 4


def test_a_pause_begins_when_the_steps_before_it_have_ended(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    late: Any = Late(clock)
    stopwatch = Stopwatch(since=0.0, tokens=[late])
    with stopwatch.paused():
        clock.now_s += 100
    assert clock.now_s - (stopwatch.since or 0) == 4


def test_control_what_is_not_paused_counts(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    stopwatch = Stopwatch(since=0.0)
    clock.take(stopwatch, 4)
    clock.now_s += 8
    assert stopwatch.lap() == {"step_s": 4.0, "tokens_per_s": 2.5, "data_wait": 0.0}


@dataclass
class Slow(Numbers):
    """Batches that take 3 s each."""

    clock: Clock = field(kw_only=True)

    def batch(self, index: int) -> dict[str, np.ndarray]:
        self.clock.now_s += 3
        return super().batch(index)


@dataclass(frozen=True)
class Timed(Watched):
    """A step of 1 s."""

    clock: Clock = field(kw_only=True)

    def __call__(self, state: TrainState, batch: Any) -> Any:
        self.clock.now_s += 1
        return super().__call__(state, batch)


@pytest.mark.parametrize(("slow", "wait"), [(True, 0.75), (False, 0.0)])
def test_the_wait_for_a_slow_source_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: bool, wait: float
):
    clock = Clock(monkeypatch)
    run(tmp_path, step=Timed(clock=clock), train=Slow(clock=clock) if slow else Numbers())
    assert recorded(tmp_path, "summary")[0]["data_wait"] == wait


def test_the_loop_counts_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    step = Watched()
    monkeypatch.setattr("time.perf_counter", lambda: float(len(step.begun)))  # a step takes a second
    run(tmp_path, step=step, eval_every=3, kept=Retention(every=3))
    _, *others = recorded(tmp_path, "train")
    assert [(record["step_s"], record["tokens_per_s"]) for record in others] == [(1.0, ROWS * SEQ)] * 3


def test_utilization_is_recorded_where_the_chip_is_known(tmp_path: Path):
    run(tmp_path, mfu_of=lambda tokens_per_s: tokens_per_s / 1e9)
    first, *others = recorded(tmp_path, "train")
    assert "mfu" not in first
    assert all(record["mfu"] == record["tokens_per_s"] / 1e9 for record in others)


def test_checkpoints_are_saved_by_time_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    step = Watched()
    monkeypatch.setattr("time.monotonic", lambda: 60.0 * len(step.begun))  # a step takes a minute
    run(tmp_path, step=step, kept=Retention(every_minutes=3, keep=9))
    assert saved_steps(tmp_path) == [3, 6, 9, 10]


@pytest.mark.parametrize("is_requested", [True, False])
def test_a_requested_checkpoint_is_saved_at_the_next_logged_step(tmp_path: Path, is_requested: bool):
    class Requested(Watched):
        def __call__(self, *args: Any) -> Any:
            if len(self.begun) == 4 and is_requested:  # in step 5; steps 1, 4, 8 and 10 are logged
                (tmp_path / "save").touch()
            return super().__call__(*args)

    run(tmp_path, step=Requested(), kept=Retention(keep=9))
    assert saved_steps(tmp_path) == ([8, 10] if is_requested else [10])
    assert not (tmp_path / "save").exists()
    assert steps_of(tmp_path, "checkpoint") == saved_steps(tmp_path)


@pytest.mark.parametrize("kept", [Retention(every_minutes=None), Retention(), Retention(every=5)])
def test_control_without_an_interval_in_minutes_checkpoints_are_saved_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Retention
):
    step = Watched()
    monkeypatch.setattr("time.monotonic", lambda: 60.0 * len(step.begun))
    run(tmp_path, step=step, kept=kept)
    assert saved_steps(tmp_path) == ([5, 10] if kept.every else [10])


def test_an_error_of_the_data_set_is_one_line_and_the_run_resumes(tmp_path: Path):
    class Broken(Numbers):
        def batches(self, start: int = 0, rows: Any = None) -> Iterator[dict[str, np.ndarray]]:
            yield from Numbers(length=6).batches(start)
            raise OSError(5, "Input/output error", "/data/a.jsonl")

    with pytest.raises(RunError) as failed:
        run(tmp_path, train=Broken(), source="jsonl /data", kept=Retention(every=4))
    message = "step 7: jsonl /data raised OSError: [Errno 5] Input/output error: '/data/a.jsonl'"
    assert str(failed.value) == f"{message}; the same command resumes from the last checkpoint"
    assert saved_steps(tmp_path) == [4]
    assert run(tmp_path).step == 10


def test_data_that_end_too_soon_are_reported_in_one_line(tmp_path: Path):
    with pytest.raises(RunError, match=r"^step 7: the data set has no more batches$"):
        run(tmp_path, train=Numbers(length=6))


def test_a_run_directory_that_is_moved_meanwhile_is_reported_in_one_line(tmp_path: Path):
    class Moving(Numbers):
        def batch(self, index: int) -> dict[str, np.ndarray]:
            if index == 5:
                (tmp_path / "run").rename(tmp_path / "gone")
            return super().batch(index)

    with pytest.raises(RunError, match=r"a record cannot be written to .*run/metrics.jsonl: No such file or directory"):
        run(tmp_path / "run", train=Moving(), kept=Retention(every=7), log_every=1000)


def test_a_checkpoint_on_a_full_disk_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(self: Any, step: int, state: Any, metrics: Any = None) -> None:
        raise ValueError(
            f'RESOURCE_EXHAUSTED: Error writing local file "{step}/w": No space left on device [OS error 28]'
        )

    with monkeypatch.context() as patch:
        patch.setattr("meshpar.checkpoint.checkpoints.Checkpoints.save", full)
        with pytest.raises(RunError) as failed:
            run(tmp_path)
    message = f"a checkpoint cannot be written to {tmp_path / 'checkpoints'}: No space left on device"
    assert str(failed.value).startswith(f"{message}; free some space")
    assert run(tmp_path).step == 10


def test_a_run_whose_last_record_is_cut_short_resumes(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, train=Numbers(interrupted=(7,)), kept=Retention(every=4), log_every=1)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    run(tmp_path, log_every=1)
    assert steps_of(tmp_path, "train") == list(range(1, 11))
