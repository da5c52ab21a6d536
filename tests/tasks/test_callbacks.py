"""Callbacks see each event of a run in its order, may end it, and are refused where they would see nothing."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

import meshpar
from meshpar import ConfigError, RunError
from meshpar.train.loop import events
from tests.comparison import largest_difference
from tests.tasks import own, runs

SIMPLE = {
    "model": {"target": "tests.tasks.own:Linear", "inputs": {"features": "x"}},
    "mesh": {"data": 2, "fsdp": 4},
    "rules": ["fsdp"],
}


def test_a_config_names_a_callback_that_sees_every_event(tmp_path):
    callback = {"target": "tests.tasks.own:Seen", "arguments": {"name": "a"}}
    settings = {"callbacks": [callback, "tests.tasks.own:largest"], "eval_every": 2, "checkpoints": 2, **SIMPLE}
    state = runs.trained(tmp_path, **settings)
    seen = own.Seen.lists["a"]
    steps = [[("step_begin", i), ("step_end", i)] for i in (1, 2, 3, 4)]
    evaluated = [[("evaluation_begin", i), ("evaluation_end", i)] for i in (2, 4)]
    saved = [("checkpoint", 2), ("checkpoint", 4)]
    assert [one for one in seen if one not in saved] == [
        ("train_begin", 0), *steps[0], *steps[1], *evaluated[0], *steps[2], *steps[3], *evaluated[1], ("train_end", 4)
    ]  # fmt: skip
    assert [one for one in seen if one in saved] == saved
    train, evaluations = (runs.records(tmp_path, kind) for kind in ("train", "evaluation"))
    assert own.Seen.losses["a"][0] == train[0]["loss"]
    assert own.Seen.losses["a"][-1] == train[-1]["loss"]
    assert train[-1]["rows_per_s"] == pytest.approx(16 / train[-1]["step_s"])
    assert "tokens_per_s" not in train[-1]
    assert own.Seen.evaluated["a"] == [
        {name: one[name] for name in ("loss", "accuracy", "largest")} for one in evaluations
    ]
    assert evaluations[-1]["largest"] == pytest.approx(float(abs(jax.tree.leaves(state.params)[0]).max()))


def test_a_callback_ends_the_run_which_evaluates_and_saves_there(tmp_path):
    runs.trained(tmp_path, callbacks=[{"target": "tests.tasks.own:Ends", "arguments": {"at": 2}}], **SIMPLE)
    (stop,) = runs.records(tmp_path, "stop")
    assert (stop["step"], stop["why"]) == (2, "loss is fine")
    assert [one["step"] for one in runs.records(tmp_path, "evaluation")] == [2]
    assert (tmp_path / "checkpoints" / "2").is_dir()


class Fails:
    def on_step_end(self, state, step, metrics):
        if step == 2:
            raise ValueError(f"loss has {len(metrics)} names")

    def on_exception(self, step, error):
        self.saw = step, str(error)


def test_an_error_of_a_callback_names_its_line_and_is_reported(tmp_path):
    made = Fails()
    line = Fails.on_step_end.__code__.co_firstlineno + 2
    with pytest.raises(
        RunError, match=rf"step 2: Fails.on_step_end failed at .*test_callbacks.py:{line}: ValueError"
    ) as got:
        meshpar.fit(runs.run(tmp_path, **SIMPLE), json=True, callbacks=[made])
    assert made.saw == (2, str(got.value))


def methods(**found):
    return type("Mine", (), found)()


REFUSED = {
    "another word": (methods(on_batch_ends=lambda self: None), "Mine.on_batch_ends", "did you mean on_step_end?"),
    "of Lightning": (methods(on_validation_end=lambda self: None), "did you mean on_evaluation_end?"),
    "arguments": (methods(on_step_end=lambda self, step: None), "def on_step_end(self, state, step, metrics)"),
    "no method": (methods(on_step_end=3), "is int, and no method", "def on_step_end"),
    "a class": (Fails, "is a class", "Fails()"),
    "nothing": (3, "has no method of an event", "on_train_begin, on_step_begin"),
    "no rows": (methods(on_evaluation_end=lambda self, *any: None), "there are no rows to evaluate", "held-out rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_callback_that_would_see_nothing_is_refused(name):
    callback, *texts = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        events.events_of([callback, methods(on_step_ends=1)], evaluates=False)
    assert all(text in str(error.value) for text in [*texts, "Mine.on_step_ends"])


def test_what_a_callback_returns_acts_or_is_refused():
    found, _ = events.events_of([methods(on_train_end=lambda self, state, step: 3)], evaluates=True)
    with pytest.raises(ConfigError, match=r"Mine.on_train_end returned 3; it may return None"):
        found.call("on_train_end", None, 4)


def test_own_loop_over_steps_is_the_same_run_and_goes_on_where_it_was_left(tmp_path):
    whole = runs.trained(tmp_path / "whole", **SIMPLE)
    losses = {}
    steps = meshpar.fit(runs.run(tmp_path / "own", **SIMPLE), json=True, steps=True)
    for state, metrics in steps:
        losses[int(state.step)] = metrics["loss"]
        if state.step == 2:
            break
    assert sorted(losses) == [1, 2]
    found = [int(state.step) for state, _ in steps]
    assert found == [3, 4]
    assert [one["step"] for one in runs.records(tmp_path / "own", "restored")] == [2]
    assert largest_difference(whole.params, state_of(tmp_path / "own", whole)) == 0
    assert losses[1] == runs.records(tmp_path / "whole", "train")[0]["loss"]


def state_of(run_dir, like):
    saved = meshpar.Checkpoints(run_dir)
    return saved.restore(jax.eval_shape(lambda: like)).params


def test_every_event_is_in_the_guide():
    guide = Path(__file__).parents[2].joinpath("docs/guides/trainer.md").read_text()
    for event, arguments in events.EVENTS.items():
        assert f"`{event}({', '.join(arguments)})`" in guide
