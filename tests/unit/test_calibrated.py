"""Measured machines: what is counted, how a table is read, what a file must have, and what changes a plan."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import meshpar
from meshpar.config import to_yaml
from meshpar.cost.flat import EXPENSIVE
from meshpar.cost.flops import ProductSizes
from meshpar.cost.touched import TRANSPOSE, Touch, functions_outside, touched_bytes
from meshpar.cost.traced import Collective
from meshpar.errors import ConfigError
from meshpar.mesh.hardware import Link, Links
from meshpar.mesh.layout import MeshLayout
from meshpar.parallel.pipeline.get_schedule import get_schedule
from meshpar.planning import calibrate as calibrating
from meshpar.planning import measured as measuring
from meshpar.planning.alternatives import MARGIN, alternatives
from meshpar.planning.compiled import table_of
from meshpar.planning.estimate import Operations, Stages, Work, idle, timeline
from meshpar.planning.machine import StatedMachine
from meshpar.planning.measured import KINDS, CollectiveTimes, FunctionTime, MeasuredMachine, Point, interpolated, read
from meshpar.planning.search import Candidate, pareto, trace
from meshpar.planning.space import SCHEDULES, Layout
from tests.unit.test_planning import RUN, region, sharded

MESH = MeshLayout(data=2).abstract()
STATED = StatedMachine("one host", 2, 2, 1e9, 1e9, Links(Link(1e6, 0.0), Link(1e6, 0.0)), overlaps=False)


def points(seconds):
    return (Point(size=1000, seconds=seconds), Point(size=3000, seconds=2 * seconds))


def machine(num_devices=2, sizes=(2,), **changes):
    tables = [CollectiveTimes(kind=kind, group_size=size, times=points(1e-3)) for kind in KINDS for size in sizes]
    known = {
        "device": "cpu",
        "num_devices": num_devices,
        "memory_bytes": 10**9,
        "platform": "cpu",
        "shares_cores": True,
    }
    functions = [FunctionTime(name=name, seconds=1e-7) for name in {*EXPENSIVE, TRANSPOSE}]
    operations = {"products": points(1e-4), "elementwise": points(1e-5), "functions": functions}
    return MeasuredMachine(**known | operations | {"collectives": tables, "new_memory": points(1e-6)} | changes)


# What is counted --------------------------------------------------------------------------------------------------

X = jnp.ones((16, 8), jnp.float32)  # 256 bytes on each of two devices
W = jnp.ones((8, 8), jnp.float32)  # 256 bytes


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: jnp.exp(-x) + 1, {Touch(512, (("exp", 64),)): 1}),  # one fusion: reads 256, writes 256
        (lambda x: -x + 1, {Touch(512): 1}),
        (lambda x: x @ W, {}),  # a product
        (lambda x: (x @ W) * x, {Touch(768): 1}),  # two operands and a result
        (
            lambda x: jax.lax.scan(lambda y, _: (jnp.exp(y), None), x, None, length=5)[0],
            {Touch(512, (("exp", 64),)): 5},
        ),
        (lambda x: x.at[jnp.arange(4)].add(x[:4]), {Touch(256): 1}),  # adds 128 bytes
        (lambda x: jax.lax.psum(x, "data") + x, {Touch(768): 1}),  # the collective is counted elsewhere
    ],
)
def test_operations_touch_what_they_read_and_write(fn, expected):
    assert touched_bytes(region(fn)(X)) == expected


def transposed(touched):
    return sum(times * dict(one.functions).get(TRANSPOSE, 0) for one, times in touched.items())


@pytest.mark.parametrize(
    ("fn", "elements"),
    [
        (lambda x: jax.lax.all_gather(x, "data", axis=1, tiled=True), 64 + 128),  # before and after it
        (lambda x: jax.lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True), 64 + 32),
        (lambda x: jax.lax.all_gather(x.T, "data", tiled=True).T, 64 + 128),  # as ZeRO-2 and ZeRO-3 do
        # Controls: the first dim in memory, a dim whose elements are rows, and a product, which reads any order.
        (lambda x: jax.lax.all_gather(x, "data", tiled=True), 0),
        (lambda x: jax.lax.all_gather(x.reshape(2, 4, 8), "data", axis=1, tiled=True), 0),
        (lambda x: x @ x.T, 0),
    ],
)
def test_what_a_collective_moves_along_the_last_dim_is_transposed(fn, elements):
    assert transposed(touched_bytes(region(fn)(X))) == elements


@pytest.mark.parametrize(
    ("sharding", "in_layers", "others"),
    [("zero1", 2, 2), ("zero2", 2, 2), ("fsdp", 3, 2)],  # ZeRO-3 gathers layers again in the backward
)
def test_zero_transposes_the_parameters_that_it_stores_along_their_last_dim(sharding, in_layers, others):
    """Each collective transposes what it reads and what it writes: a half and a whole parameter."""
    traced = trace(RUN, Layout((("fsdp", 2),), sharding=sharding, remat="none"), machine())
    assert traced
    layer, embedding = 32 * 32 + 64 * 32, 288 * 32  # the output projections of attention and MLP
    scales = 4 * 2 * 32 if sharding == "zero1" else 0  # its gathers are of all layers at once, so of matrices
    expected = 1.5 * (in_layers * 4 * layer + scales + others * embedding)
    assert transposed(traced.work.computes.touched) == expected


def test_functions_of_the_update_are_counted_outside_of_manual_regions():
    def update(x):
        return jnp.sqrt(sharded(jnp.exp)(x)) / x

    assert functions_outside(jax.make_jaxpr(update)(X)) == {"sqrt": 128, "div": 128}


def test_ends_of_a_pipeline_count_on_one_stage_in_the_mean():
    """All stages but one skip the head, so two stages together have the products of one device."""
    layout = Layout((("pipe", 2),), schedule="1f1b", num_microbatches=4, remat="none")
    apart = machine(shares_cores=False)
    traced = [trace(RUN, layout, machine()), trace(RUN, layout, apart), trace(RUN, Layout((), remat="none"), apart)]
    shared, busiest, one = (found.estimate.terms["products"] for found in traced if found)  # in proportion to FLOPs
    assert busiest > shared
    assert 2 * shared == pytest.approx(one, rel=1e-6)


# Tables -----------------------------------------------------------------------------------------------------------


def test_a_collective_takes_what_its_table_says():
    mesh = MeshLayout(data=2).abstract()
    assert machine().collective_s(Collective("all_reduce", ("data",), 2000, 2), mesh) == pytest.approx(1.5e-3)
    assert interpolated(points(1.0), 6000) == 4.0


def test_an_operation_takes_its_bytes_and_its_functions():
    assert machine().touch_s(Touch(2000, (("exp", 10), ("div", 5)))) == pytest.approx(1.5e-5 + 15e-7)


def test_no_core_of_simulated_devices_is_idle_and_nothing_is_hidden():
    """Where each device has a core of its own, or is a chip, a pipeline waits while it fills and empties."""
    mesh = MeshLayout(data=2, pipe=2).abstract()
    beside = [Collective("all_reduce", ("data",), 1000, 2)]
    stages = Stages((1, 1), 1, Operations({}, {}), 1)  # two equal ones
    work = Work(
        mesh, Operations({ProductSizes("", 1000): 1.0}, {Touch(1000): 1.0}), beside, [], 1.5, 0, 0, stages=stages
    )
    shared = work.on(machine())
    terms = {"products": 1e-4, "other operations": 1e-5, "new memory": 1e-6, "exposed over data": 1e-3}
    assert shared.terms == pytest.approx(terms)
    apart = work.on(machine(platform="gpu", shares_cores=False))
    assert apart.terms["exposed over data"] == pytest.approx(1e-3 - 1.1e-4)
    assert apart.terms["bubble"] == pytest.approx(0.5 * 1e-3)
    on_cores = work.on(machine(shares_cores=False))  # each core copies what its device sends
    assert on_cores.terms["exposed over data"] == pytest.approx(1e-3)
    assert on_cores.terms["bubble"] == pytest.approx(0.5 * (1.1e-4 + 1e-3))


def test_a_calibration_is_written_and_read(tmp_path, monkeypatch):
    """Greater sizes take longer, and the file gives the same machine."""
    for module in (calibrating, measuring):
        monkeypatch.setattr(module, "group_sizes", lambda num_devices: [2])
    monkeypatch.setattr(calibrating, "REPEATS", 8)
    measured = calibrating.calibrate(sides=(8, 256), sizes=(2**10, 2**20), memory_sizes=(2**20,), num_rounds=3)
    (tmp_path / "here.yaml").write_text(to_yaml(measured))
    assert read(tmp_path / "here.yaml") == measured
    assert measured.num_devices == jax.device_count()
    tables = [measured.products, measured.elementwise]
    for table in [*tables, *(one.times for one in measured.collectives)]:
        assert table[0].seconds < table[1].seconds


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_devices": 4}, "all_gather in groups of 4\n    has no times\n    measure them: meshpar calibrate FILE"),
        ({"functions": []}, "functions: exp\n    has no time\n    measure it: meshpar calibrate FILE"),
        ({"products": []}, "products"),
        ({"memory_bytes": -1}, "memory_bytes"),
    ],
)
def test_a_target_without_a_table_is_an_error(tmp_path, changes, message):
    path = tmp_path / "here.yaml"
    path.write_text(to_yaml(machine().model_dump(mode="json") | changes))
    with pytest.raises(ConfigError) as error:
        read(path)
    assert message in str(error.value)


def test_calibrate_does_not_overwrite_a_file(command, tmp_path):
    path = tmp_path / "here.yaml"
    path.write_text("mine")
    said = command("calibrate", path)
    assert said.code == 2
    assert "use --overwrite to replace it" in said.err
    assert path.read_text() == "mine"


# What changes the answer --------------------------------------------------------------------------------------------


def candidate(flops, sent, held, machine=STATED):
    layout = Layout((("data", 2),), num_microbatches=flops + sent + held)  # any: layouts only have to differ
    work = Work(
        MESH,
        Operations({ProductSizes("", flops): 1.0}, {}),
        [Collective("all_reduce", ("data",), sent, 2)],
        [],
        1.0,
        0,
        held,
    )
    return Candidate(layout, work, work.on(machine))


def test_the_nearest_change_that_makes_another_layout_win_is_found():
    """The first computes more and sends less: with a link that is fast enough the second wins."""
    first = candidate(10**9, 10**6, 100)
    second = candidate(5 * 10**8, 2 * 10**6, 100)
    assert first.estimate.total_s == 2.0
    assert second.estimate.total_s == 2.5
    found = {str(one.figure).split(" ", 1)[1]: one for one in alternatives(STATED, [first, second], first, 1000)}
    link = found["GB/s inside a host"]
    assert link.layout == second.layout
    faster = float(link.figure.split()[0]) * 1e9 / 1e6
    assert 2.0 < faster < 2.0 * 2**0.5  # equal at twice the speed, and the next step of a quarter doubling is found
    assert "of memory on a device" not in found


def test_a_layout_that_does_not_fit_wins_with_more_memory():
    first = candidate(10**9, 10**6, 100)
    faster = candidate(10**8, 10**6, 150)
    found = alternatives(STATED, [first, faster], first, 120)
    memory = next(one for one in found if one.figure.endswith("of memory on a device"))
    assert memory.layout == faster.layout
    assert 120 < 150 <= float(memory.figure.split()[0])


def test_control_a_layout_that_wins_by_less_than_the_margin_changes_nothing():
    first = candidate(10**9, 10**6, 100)
    other = replace(first, layout=candidate(1, 1, 1).layout)
    assert MARGIN > 1
    assert alternatives(STATED, [first, other], first, 1000) == []


def test_pareto_keeps_what_no_other_beats_in_time_and_memory():
    fast = candidate(10**8, 1, 300)
    worse = candidate(2 * 10**8, 1, 400)
    small = candidate(3 * 10**8, 1, 100)
    assert pareto([fast, worse, small], lambda one: one.estimate) == [fast, small]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_idle_time_of_a_long_schedule_is_that_of_a_shorter_one(kind):
    """`idle` simulates four microbatches a stage; the whole schedule has the same bubble."""
    schedule = get_schedule(kind, 4, 64)
    whole = timeline(schedule, 4, recomputes=True)
    assert idle(schedule, 4, True) == pytest.approx(whole.makespan / whole.work, rel=1e-12)
    assert idle(schedule, 4, True) > 1.001


# Compiled -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_best_layouts_are_compiled_and_dropped_if_they_do_not_fit(tmp_path):
    """The compiled step computes and sends what the traced one says; its memory decides."""
    path = tmp_path / "here.yaml"
    path.write_text(to_yaml(machine(num_devices=8, sizes=(2, 4, 8))))
    fix = ["mesh.data=4", "mesh.tensor=2", "num_microbatches=1", "model.remat=none"]
    planned = meshpar.plan(RUN, str(path), fix=fix).compile()
    (one,) = planned.compiled
    assert one.flops == one.candidate.work.computes.flops
    assert one.sent_bytes == pytest.approx(one.candidate.work.sent_bytes, rel=1e-3)
    assert planned.ranked == [one.candidate]
    assert replace(planned, compiled=[replace(one, at_most=one.held_bytes - 1)]).ranked == []
    assert "does not fit: dropped" in table_of([replace(one, at_most=one.held_bytes - 1)])


def test_a_gpu_is_not_measured_with_programs_for_cpus(monkeypatch):
    """On an H100 they were so small that a step was planned to take 17 times as long as it took."""
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="gpu", device_kind="NVIDIA H100")])
    with pytest.raises(ConfigError, match="too small for a NVIDIA H100: use calibrate_chip"):
        calibrating.calibrate()
