"""Early stopping and callbacks in the loop of `test_loop`: when a run ends, and what it records and remembers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from meshpar.checkpoint.retention import Retention
from meshpar.errors import ConfigError
from meshpar.optim.ema import averaged
from meshpar.train.loop.stopping import EarlyStopping
from tests.unit.test_loop import Numbers, recorded, run, saved_steps, steps_of


def scores(*values: float) -> Any:
    """A callback that returns the next of `values` at each evaluation, which is every second step."""
    return lambda state, step: {"score": values[step // 2 - 1]}


def stopped(run_dir: Path, callback: Any, **settings: Any) -> int:
    """The step at which a run of ten ends."""
    rule = EarlyStopping(**{"metric": "score", "patience": 2} | settings)
    return int(run(run_dir, eval_every=2, early_stopping=rule, callbacks=[callback]).step)


def test_a_run_ends_after_patience_evaluations_that_are_no_better_and_saves_its_state(tmp_path):
    assert stopped(tmp_path, scores(3, 2, 2.5, 2, 9)) == 8
    assert saved_steps(tmp_path) == [8]
    assert steps_of(tmp_path, "evaluation") == [2, 4, 6, 8]
    (record,) = recorded(tmp_path, "stop")
    why = "score was best at step 4, 2.0000, and no better in 2 evaluations since"
    assert record == {"kind": "stop", "step": 8, "why": why, "best": 2.0, "best_step": 4}
    assert recorded(tmp_path, "summary")[0]["step"] == 8


@pytest.mark.parametrize(
    ("values", "settings", "end"),
    [
        ((3, 2, 2.5, 1.9, 2), {}, 10),
        ((3, 2.5, 2.4, 2.0, 1), {"min_delta": 0.6}, 10),
        ((3, 2.5, 2.4, 2.45, 1), {"min_delta": 0.7}, 6),
        ((1, 2, 3, 4, 5), {"best": "highest"}, 10),
        ((1, 2, 3, 4, 5), {}, 6),
        ((float("nan"), 2, float("nan"), float("nan"), 1), {}, 8),
    ],
)
def test_patience_min_delta_and_best_decide_when_a_run_ends(tmp_path, values, settings, end):
    assert stopped(tmp_path, scores(*values), **settings) == end


def test_the_best_is_the_best_of_all_although_it_gained_too_little(tmp_path):
    """Waiting is counted from the last gain of more than min_delta; the record names the best evaluation of all."""
    assert stopped(tmp_path, scores(3.0, 2.0, 1.95, 1.97, 9), min_delta=0.1) == 8
    (record,) = recorded(tmp_path, "stop")
    assert (record["best"], record["best_step"]) == (1.95, 6)
    since = "no better by more than 0.1 than at step 4, 2.0000, in 2 evaluations since"
    assert record["why"] == f"score was best at step 6, 1.9500, and {since}"


def test_a_resumed_run_remembers_how_long_it_has_waited(tmp_path):
    rule: dict[str, Any] = {"early_stopping": EarlyStopping(metric="score", patience=2), "eval_every": 2}
    rule["callbacks"] = [scores(1, 2, 3, 4, 5)]
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, train=Numbers(interrupted=(4,)), kept=Retention(every=4), **rule)
    assert run(tmp_path, **rule).step == 6
    assert steps_of(tmp_path, "evaluation") == [2, 4, 6]


def test_control_a_run_that_forgot_would_end_later(tmp_path, monkeypatch):
    monkeypatch.setattr("meshpar.train.loop.loop.evaluations", lambda file, start: [])
    with pytest.raises(AssertionError):
        test_a_resumed_run_remembers_how_long_it_has_waited(tmp_path)


def test_a_run_that_stopped_early_does_not_continue_when_it_is_started_again(tmp_path):
    assert stopped(tmp_path, scores(1, 2, 3)) == 6
    assert stopped(tmp_path, scores(1, 2, 3)) == 6
    assert steps_of(tmp_path, "stop") == [6, 6]
    assert saved_steps(tmp_path) == [6]


def test_a_callback_gets_the_state_and_may_move_data_as_it_likes(tmp_path):
    def largest(state: Any, step: int) -> dict[str, Any]:
        return {"largest": jnp.max(averaged(state)["w"]), "twice": 2 * step}

    state = run(tmp_path, eval_every=5, callbacks=[largest])
    first, last = recorded(tmp_path, "evaluation")
    assert (first["twice"], last["twice"]) == (10.0, 20.0)
    assert last["largest"] == float(state.params["w"].max())


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"loss": 1.0}, "give -> loss\n    this name is recorded already\n    another name"),
        ({"each": [1.0, 2.0]}, "give -> each\n    list is not a number\n    a mean, or a name for each number"),
        ({"name": "good"}, "give -> name\n    str is not a number\n    a mean, or a name for each number"),
    ],
)
def test_values_of_a_callback_that_cannot_be_recorded_are_refused(tmp_path, found, message):
    def give(state: Any, step: int) -> dict[str, Any]:
        return found

    with pytest.raises(ConfigError) as refused:
        run(tmp_path, callbacks=[give])
    heading = "an evaluation callback returned values that cannot be recorded, at step 10:"
    assert str(refused.value) == f"{heading}\n  {message}"


def test_a_metric_that_is_never_recorded_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no evaluation has 'acc'; there are loss, score, tokens"):
        stopped(tmp_path, scores(1, 2), metric="acc")


@pytest.mark.parametrize(("metric", "best"), [("accuracy", "highest"), ("recall_at_1", "highest"), ("mse", "lowest")])
def test_the_name_of_a_metric_says_which_values_are_better(metric, best):
    evaluations = [{"step": step, metric: step / 10} for step in range(1, 5)]
    given = EarlyStopping(patience=2, metric=metric)
    assert (given.best, Retention(metric=metric).best) == (best, best)
    assert (given.verdict(evaluations) is None) == (best == "highest")
    assert EarlyStopping(patience=2, metric=metric, best="lowest").verdict(evaluations)
