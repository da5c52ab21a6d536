"""Learning rate schedules: their end points and their steps; each check also catches planted faults."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpar.errors import ConfigError
from meshpar.optim.schedule import WSD, Constant, Cosine, Linear

PEAK = 0.5
WARMUP = st.integers(0, 20)
FINAL = st.floats(0, 1)
FORM = st.sampled_from(["linear", "1-sqrt"])
SCHEDULES = st.one_of(
    st.builds(Constant, warmup_steps=WARMUP),
    st.builds(Linear, warmup_steps=WARMUP, final=FINAL),
    st.builds(Cosine, warmup_steps=WARMUP, final=FINAL),
    st.builds(WSD, warmup_steps=WARMUP, final=FINAL, decay_steps=st.integers(1, 20), shape=FORM),
)


def rates(schedule, num_steps):
    """Learning rates over the peak, from one update before the first to one after the last."""
    return np.asarray(schedule(jnp.arange(-1, 91, dtype=jnp.int32)))[: num_steps + 2] / PEAK


def check_ends(rates, schedule):
    """The rate is 0 before the first update, the peak after the warm-up, and the final fraction after the last."""
    np.testing.assert_allclose(rates[0], 0.0, atol=1e-6)
    np.testing.assert_allclose(rates[schedule.warmup_steps + 1], 1.0, rtol=1e-6)
    np.testing.assert_allclose(rates[-1], getattr(schedule, "final", 1.0), atol=1e-6)
    assert (rates[1:-1] > 0).all()


def check_continuity(rates, schedule):
    """The rate rises to the peak and never rises again; no change exceeds the steepest slope of the form."""
    change = np.diff(rates)
    warmup = schedule.warmup_steps + 1
    decay = getattr(schedule, "decay_steps", None) or len(rates) - 1 - warmup
    steepest = decay**-0.5 if getattr(schedule, "shape", None) == "1-sqrt" else np.pi / 2 / decay
    np.testing.assert_allclose(change[:warmup], 1 / warmup, atol=1e-6)
    assert (change[warmup:] <= 1e-6).all()
    assert (change[warmup:] >= -steepest * (1 - getattr(schedule, "final", 0.0)) - 1e-6).all()


@given(SCHEDULES, st.integers(41, 89))
@settings(max_examples=50, deadline=None)
def test_schedules_have_their_end_points_and_no_jumps(schedule, num_steps):
    got = rates(schedule.build(PEAK, num_steps), num_steps)
    check_ends(got, schedule)
    check_continuity(got, schedule)


@pytest.mark.parametrize(
    ("check", "fault"),
    [
        (check_ends, lambda made: lambda count: made(count + 1)),
        (check_ends, lambda made: lambda count: made(count - 1)),
        (check_ends, lambda made: lambda count: 0.9 * made(count)),
        (check_continuity, lambda made: lambda count: jnp.where(count == 20, 0.0, 1.0) * made(count)),
        (check_continuity, lambda made: lambda count: jnp.where(count == 20, 1.05, 1.0) * made(count)),
        (check_continuity, lambda made: lambda count: jnp.where(count < 35, 1.0, 0.5) * made(count)),
    ],
    ids=["early", "late", "lower", "a_hole", "a_bump", "a_jump"],
)
@pytest.mark.parametrize("schedule", [Linear(warmup_steps=5), Cosine(warmup_steps=5)], ids=["linear", "cosine"])
def test_control_a_fault_in_a_schedule_is_seen(check, fault, schedule):
    check(rates(schedule.build(PEAK, 50), 50), schedule)
    with pytest.raises(AssertionError):
        check(rates(fault(schedule.build(PEAK, 50)), 50), schedule)


def test_wsd_stays_at_the_peak_until_its_decay():
    got = rates(WSD(warmup_steps=4, decay_fraction=0.25).build(PEAK, 40), 40)
    assert (got[5:32] == 1.0).all()
    assert got[32] < 1.0
    assert (got == rates(WSD(warmup_steps=4, decay_steps=10).build(PEAK, 40), 40)).all()
    assert (rates(WSD().build(PEAK, 40), 40) == rates(WSD(decay_fraction=0.2).build(PEAK, 40), 40)).all()


def test_a_warm_up_that_is_longer_than_the_run_is_refused():
    with pytest.raises(ConfigError) as error:
        Cosine(warmup_steps=120).build(PEAK, 100)
    assert str(error.value) == (
        "the learning rate schedule does not fit a run of 100 steps:\n"
        "  optim.schedule.warmup_steps\n"
        "    120 is more than num_steps = 100\n"
        "    optim.schedule.warmup_steps=100 or less, or num_steps=120 or more"
    )


@pytest.mark.parametrize(
    ("schedule", "where"),
    [(WSD(warmup_steps=80, decay_steps=30), "decay_steps"), (WSD(warmup_steps=81), "decay_fraction")],
)
def test_a_decay_that_is_longer_than_the_run_is_refused(schedule, where):
    with pytest.raises(ConfigError) as error:
        schedule.build(PEAK, 100)
    length = schedule.warmup_steps + (schedule.decay_steps or 20)
    assert f"  optim.schedule.{where}\n" in str(error.value)
    assert str(error.value).endswith(f"a shorter decay, or num_steps={length} or more")
    schedule.build(PEAK, 110)


def test_two_lengths_of_a_decay_are_refused():
    with pytest.raises(ValueError, match="give one of them"):
        WSD(decay_steps=10, decay_fraction=0.1)
