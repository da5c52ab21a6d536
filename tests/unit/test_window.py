"""A run whose steps are skipped fails after a bound, and keeps the checkpoints from before."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from meshpar.checkpoint.retention import Retention
from meshpar.errors import RunError
from meshpar.train.loop.window import Window
from meshpar.train.step import IN_FLIGHT
from tests.unit.test_loop import Numbers, recorded, run, saved_steps


def ends_at(skipped: list[int], limit: int | None) -> tuple[int, int] | None:
    """The step at which a window of these steps (1: skipped) raises, and how many had begun by then."""
    window = Window(0, 0, limit)
    total = 0
    for begun, is_skipped in enumerate(skipped, 1):
        total += is_skipped
        try:
            window.add({"skipped": jnp.int32(total)})
            if begun == len(skipped):
                window.drain()
        except RunError:
            return window.step, begun
    return None


@pytest.mark.parametrize("at", [0, 1, 2, 3, 7])
def test_a_streak_as_long_as_the_limit_is_seen_wherever_it_begins(at):
    pattern = [0] * at + [1] * 3 + [0] * (40 - at)
    step, begun = ends_at(pattern, 3) or (0, 0)
    assert step == at + 3
    assert begun <= step + IN_FLIGHT + 3


@pytest.mark.parametrize("at", range(6))
def test_control_a_shorter_streak_or_no_limit_is_no_error(at):
    assert ends_at([0] * at + [1, 1, 0] * 10, 3) is None
    assert ends_at([0] * at + [1] * 30, None) is None


def test_a_streak_at_the_very_end_is_seen():
    assert ends_at([0, 1, 1, 1], 3) == (4, 4)


def test_a_run_of_skipped_steps_fails_and_its_checkpoints_stay(tmp_path):
    bad = tuple(range(4, 10))
    with pytest.raises(RunError) as failed:
        run(tmp_path, train=Numbers(bad=bad), kept=Retention(every=2, keep=1), max_skipped_steps=5)
    message = "the run stopped after step 9: loss or gradients were not finite in 5 steps in a row, from step 5 on"
    assert str(failed.value).startswith(f"{message}, and each was skipped; ")
    assert failed.value.exit_code == 1
    assert saved_steps(tmp_path) == [4]


def test_a_checkpoint_that_is_due_waits_for_a_step_that_is_finite(tmp_path):
    run(tmp_path, train=Numbers(bad=(3, 4)), kept=Retention(every=4, keep=9), max_skipped_steps=5)
    assert saved_steps(tmp_path) == [6, 8, 10]


def test_a_last_step_that_was_skipped_removes_no_checkpoint(tmp_path):
    run(tmp_path, train=Numbers(bad=(9,)), kept=Retention(every=4, keep=1), max_skipped_steps=5)
    assert saved_steps(tmp_path) == [8, 10]
    assert recorded(tmp_path, "summary")[0]["skipped"] == 1


def test_control_a_last_step_that_was_not_skipped_removes_the_checkpoint_before(tmp_path):
    run(tmp_path, kept=Retention(every=4, keep=1), max_skipped_steps=5)
    assert saved_steps(tmp_path) == [10]
