"""Simulated schedules: closed forms, deadlocks, orders from files, pictures."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpar.errors import ScheduleError
from meshpar.parallel.pipeline import gantt
from meshpar.parallel.pipeline.get_schedule import KINDS, get_schedule
from meshpar.parallel.pipeline.schedule import GPipe, Interleaved, OneFOneB, Op, ScheduleFile, ZeroBubbleH1, each, parse
from meshpar.parallel.pipeline.simulate import OpTimes, simulate, simulate_orders

EVERY = [(p, m) for p in (2, 4, 8) for m in range(p, 8 * p + 1)]
SAMPLE = [(2, 2), (2, 3), (2, 16), (4, 4), (4, 9), (4, 16), (8, 8), (8, 16)]
CASES = [pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.slow) for case in EVERY]
DEALT = [
    pytest.param(p, m, v, marks=[] if (p, m) in SAMPLE and v < 3 else pytest.mark.slow)
    for p, m in EVERY if m % p == 0 for v in (2, 4)
]  # fmt: skip


@pytest.mark.parametrize(("p", "m"), CASES)
def test_bubbles_and_activations_equal_the_closed_forms(p, m):
    """The papers' table for F = B = W, exactly."""
    simulated = {name: simulate(get_schedule(name, p, m), p) for name in ("gpipe", "1f1b", "zb_h1", "zb_h2", "zbv")}
    assert simulated["gpipe"].bubble == simulated["1f1b"].bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    assert simulated["zb_h1"].bubble == pytest.approx((p - 1) / (3 * m + p - 1), abs=1e-12)
    assert simulated["gpipe"].peak == m
    assert simulated["1f1b"].peak == simulated["zb_h1"].peak == simulated["zbv"].peak == p
    if m >= 2 * p - 1:
        assert simulated["zb_h2"].bubble == simulated["zbv"].bubble == 0
        assert simulated["zb_h2"].peak == 2 * p - 1
        assert simulated["zbv"].makespan == 3 * m + (p - 1) / 2
    # A step waits for all stages, so it pays for the last stage's late start even where no stage is idle.
    assert simulated["zb_h1"].makespan == 3 * m + p - 1 <= simulated["zb_h2"].makespan


@pytest.mark.parametrize(("p", "m", "v"), DEALT)
def test_interleaved_stages_have_the_bubble_of_the_closed_form(p, m, v):
    simulated = simulate(Interleaved(num_microbatches=m, num_chunks=v), p)
    assert simulated.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)
    assert simulated.peak == (p if m == p else p * (1 + (p - 1) / (p * v)))


def test_control_a_uniform_scan_of_f_and_b_has_another_bubble():
    """A scan with F and B in each tick, where a stage that lacks one of them waits, pays the bubble twice."""
    p = 4
    m = 8
    ticks = m + 2 * (p - 1)
    assert 1 - m / ticks == pytest.approx(2 * (p - 1) / (m + 2 * p - 2))
    assert 1 - m / ticks != pytest.approx(simulate(OneFOneB(num_microbatches=m), p).bubble, rel=0.1)


def test_transfers_and_unequal_times_count():
    times = OpTimes(F=1.0, B=2.0, W=0.5, transfer=0.25)
    p = 3
    m = 5
    simulated = simulate(GPipe(num_microbatches=m), p, times)
    assert simulated.makespan == pytest.approx((m + p - 1) * 3.5 + 2 * (p - 1) * 0.25)
    assert simulate(ZeroBubbleH1(num_microbatches=m), p, times).work == pytest.approx(m * 3.5)


def test_a_swap_of_two_orders_deadlocks_and_says_who_waits_for_what():
    schedule = OneFOneB(num_microbatches=4)
    orders = schedule.orders(3)
    orders[2][0], orders[2][3] = orders[2][3], orders[2][0]  # B1 before F0
    with pytest.raises(ScheduleError) as error:
        simulate_orders(orders, schedule)
    assert str(error.value) == (
        "the stages wait for each other:\n"
        "  stage 0, tick 3\n    B0 waits for B0 of stage 1, which is at B0\n"
        "  stage 1, tick 3\n    B0 waits for B0 of stage 2, which is at B1\n"
        "  stage 2, tick 0\n    B1 waits for F1 of stage 2, which is at B1"
    )


def test_missing_and_repeated_operations_of_all_stages_are_reported():
    schedule = OneFOneB(num_microbatches=2)
    orders = [[*each("F", range(2)), Op("B", 0)], [*schedule.order(1, 2), Op("B", 7), Op("F", 1)]]
    with pytest.raises(ScheduleError) as error:
        simulate_orders(orders, schedule)
    assert str(error.value) == (
        "the schedule does not have every operation exactly once:\n"
        "  stage 0\n    missing: B1\n"
        "  stage 1\n    more than once: F1\n"
        "  stage 1\n    unknown microbatch, chunk or kind: B7"
    )


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_legal_order_ends_without_losing_an_operation(data):
    """The orders are random, and respect the dependencies of operations."""
    p = data.draw(st.integers(1, 4))
    m = data.draw(st.integers(1, 6))
    schedule = ZeroBubbleH1(num_microbatches=m)
    orders = random_orders(data, p, m)
    simulated = simulate_orders(orders, schedule)
    assert len(simulated.ran) == 3 * p * m
    assert simulated.peak <= m
    assert 3 * m <= simulated.span <= simulated.makespan


def random_orders(data, p, m):
    """Random legal orders: each turn draws one of the operations that are ready, of any stage."""
    orders = [[] for _ in range(p)]
    done = set()
    ready = {(0, Op("F", j)) for j in range(m)}
    while ready:
        i, op = data.draw(st.sampled_from(sorted(ready)))
        ready.remove((i, op))
        orders[i].append(op)
        done.add((i, op))
        _, j, _ = op
        if op.kind == "F":
            ready |= {(i + 1, Op("F", j))} if i + 1 < p else {(i, Op("B", j))}
        elif op.kind == "B":
            ready |= {(i, Op("W", j))} | ({(i - 1, Op("B", j))} if i else set())
    return orders


def test_orders_are_read_from_a_file(tmp_path):
    file = tmp_path / "orders.txt"
    file.write_text("# two stages\nF0 F1 B0 W0 B1 W1\n\nF0 B0 F1 B1 W0 W1  # the last\n")
    schedule = ScheduleFile(num_microbatches=2, path=file)
    assert [str(op) for op in schedule.order(1, 2)] == ["F0", "B0", "F1", "B1", "W0", "W1"]
    assert simulate(schedule, 2).makespan == 7


def test_all_problems_of_a_file_of_orders_are_reported(tmp_path):
    with pytest.raises(
        ScheduleError, match=r"(?s)orders of 2 stages, but there are 3.*stage 1\n.*not an operation: G1, F"
    ):
        parse(["F0 B0", "F0 G1 F"], 3)
    with pytest.raises(ScheduleError, match="cannot be read"):
        simulate(ScheduleFile(num_microbatches=1, path=tmp_path / "none"), 1)


def test_interleaved_proposes_numbers_of_microbatches_that_fit():
    with pytest.raises(
        ScheduleError, match=r"num_microbatches=4 or parallel.pipeline.num_microbatches=8, or parallel.pipeline={"
    ):
        get_schedule("interleaved", 4, 6)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "written"])
def test_pictures_show_every_operation(name):
    simulated = simulate(get_schedule(name, 4, 8), 4)
    drawn = gantt.svg(simulated, name)
    assert drawn.count("<title>") == len(simulated.ran)
    assert ("backward, weights" in drawn) == any(one.op.kind == "W" for one in simulated.ran)
    assert ">time<" in drawn
    wide = gantt.text(simulated, 500).splitlines()
    assert [line.count("F") for line in wide] == [8 * simulated.chunks] * 4
    assert max(map(len, gantt.text(simulated, 60).splitlines())) <= 70


@given(
    st.sampled_from(["gpipe", "1f1b", "zb_h1", "zbv", "interleaved"]),
    st.tuples(*[st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.7, 2.5])] * 4),
)
def test_no_operation_is_lost_in_a_picture_whatever_the_times(name, times):
    simulated = simulate(get_schedule(name, 3, 6), 3, OpTimes(*times))
    lines = gantt.text(simulated, 10_000).splitlines()
    assert [len(re.findall(r"[FBW]\d", line)) for line in lines] == [len(stage) for stage in simulated.stages]


def test_half_a_unit_of_transfer_leaves_every_operation_in_the_picture(command):
    result = command("schedule", "1f1b", "--stages", 2, "--microbatches", 4, "--transfer", 0.5)
    assert result.out.splitlines()[:2] == [
        "stage 0   F0 F1 .  .  .  B0 -  F2 B1 -  F3 .  B2 -  .  B3 -",
        "stage 1   .  .  F0 B0 -  F1 B1 -  .  F2 B2 -  F3 B3 -  .  .",
    ]


def test_a_coarse_picture_says_how_many_operations_it_shows():
    simulated = simulate(get_schedule("1f1b", 4, 64), 4)
    last = gantt.text(simulated, 60).splitlines()[-1]
    assert re.fullmatch(r"\d+ of 512 operations are shown; a wider terminal shows all", last)
    assert "shown" not in gantt.text(simulated, 1000)


def test_the_schedule_command_draws_text_and_svg(command, tmp_path):
    result = command("schedule", "1f1b", "--stages", 2, "--microbatches", 2, "--svg", tmp_path / "a.svg")
    assert result.code == 0
    assert result.out.splitlines()[:2] == ["stage 0   F0 F1 .  .  B0 -  .  B1 -", "stage 1   .  F0 B0 -  F1 B1 -  .  ."]
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


def test_the_schedule_command_names_the_nearest_schedule(command):
    result = command("schedule", "zb_h3")
    assert result.code == 2
    assert "did you mean zb_h" in result.err


def test_forwards_alone_are_no_schedule(tmp_path):
    (tmp_path / "orders.txt").write_text("F0\nF0\n")
    with pytest.raises(ScheduleError, match="missing: B0"):
        simulate(ScheduleFile(num_microbatches=1, path=tmp_path / "orders.txt"), 2)
