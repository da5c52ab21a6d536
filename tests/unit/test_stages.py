"""Stages that are not equal: the best cut by brute force, their bubble by simulation, and plans for different chips."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest

import meshpar
from meshpar.cost.flops import ProductSizes
from meshpar.errors import MeshError
from meshpar.mesh import targets
from meshpar.mesh.hardware import Link, Links
from meshpar.mesh.layout import AXES, AxisSizes, MeshLayout, _arrange
from meshpar.parallel.pipeline.get_schedule import KINDS, get_schedule
from meshpar.parallel.pipeline.schedule import OneFOneB
from meshpar.parallel.pipeline.simulate import OpTimes, simulate
from meshpar.planning import compiled as compiling
from meshpar.planning.estimate import Operations, Stages, Work, timeline
from meshpar.planning.machine import StatedMachine, hosts
from meshpar.planning.mixed import MixedMachine
from meshpar.planning.stages import balanced, cut_with
from tests.unit.test_planning import RUN

FLOPS = 1000
MACHINE = StatedMachine("plain", 64, 8, FLOPS, 1e12, Links(Link(1e9, 0.0), Link(1e9, 0.0)))


def slowest(counts, seconds, ends):
    return max(end + count * each for count, each, end in zip(counts, seconds, ends, strict=True))


def test_a_balanced_cut_is_the_best_of_all():
    draw = random.Random(0)
    is_even_worse = 0
    for _ in range(200):
        num_stages = draw.randint(2, 4)
        num_layers = draw.randint(num_stages, 10)
        seconds = [draw.choice([0.5, 1.0, draw.uniform(0.2, 3)]) for _ in range(num_stages)]
        ends = [draw.choice([0.0, draw.uniform(0, 4)]) for _ in range(num_stages)]
        places = combinations(range(1, num_layers), num_stages - 1)
        every = [np.diff([0, *inside, num_layers]).tolist() for inside in places]
        best = min(slowest(counts, seconds, ends) for counts in every)
        found = balanced(num_layers, seconds, ends)
        assert sum(found) == num_layers
        assert slowest(found, seconds, ends) == pytest.approx(best)
        most = draw.randint(-(-num_layers // num_stages), num_layers)
        limited = balanced(num_layers, seconds, ends, most=most)
        assert max(limited) <= most
        best_limited = min(slowest(counts, seconds, ends) for counts in every if max(counts) <= most)
        assert slowest(limited, seconds, ends) == pytest.approx(best_limited)
        is_even_worse += slowest(np.diff(np.linspace(0, num_layers, num_stages + 1, dtype=int)), seconds, ends) > best
    assert is_even_worse > 100, "otherwise an even cut passes too"


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zbv"])
def test_a_cut_gives_each_stage_its_layers(kind):
    schedule = get_schedule(kind, 4, 4)
    counts = [0] * 4
    for virtual, count in enumerate(cut_with(schedule, [7, 6, 3, 5])):
        counts[schedule.stage_of(virtual, 4)] += count
    assert counts == [7, 6, 3, 5]


def estimated_over_simulated(kind, shares, num_microbatches):
    """The estimate of a step whose stages take these times, over the makespan of its simulated schedule."""
    num_stages = len(shares)
    schedule = get_schedule(kind, num_stages, num_microbatches)
    equal = timeline(schedule, num_stages, recomputes=False)
    work = Work(
        mesh=MeshLayout(pipe=num_stages).abstract(),
        computes=Operations({ProductSizes("", 1): FLOPS}, {}),
        beside=(),
        waits=(),
        idle=equal.makespan / equal.work,
        states_bytes=0,
        step_bytes=0,
        stages=Stages(shares, 1, Operations({}, {}), num_stages - 1),
    )
    simulated = timeline(schedule, num_stages, recomputes=False, shares=shares)
    return work.on(MACHINE).total_s / simulated.makespan * simulated.work, equal.makespan / simulated.makespan


@pytest.mark.parametrize(("kind", "worst"), [("gpipe", 0), ("1f1b", 0.16), ("zb_h1", 0.1), ("zbv", 0.1)])
def test_the_bubble_of_unequal_stages_is_about_that_of_the_simulated_schedule(kind, worst):
    """Exact for GPipe, too long for others; control: a step whose stages are all as slow as the slowest is longer."""
    draw = random.Random(0)
    found = []
    for _ in range(40):
        num_stages = draw.choice([2, 4, 8])
        shares = [draw.uniform(0.5, 1) for _ in range(num_stages)]
        shares[draw.randrange(num_stages)] = 1.0
        found.append(estimated_over_simulated(kind, shares, num_stages * draw.choice([1, 2, 4])))
    errors = [ratio - 1 for ratio, _ in found]
    assert min(errors) >= -1e-9
    assert max(errors) <= worst + 1e-9
    assert median(errors) < 0.04
    assert median(blind - 1 for _, blind in found) > 2 * median(errors) + 0.01


def test_equal_shares_are_equal_stages():
    schedule = KINDS["interleaved"](num_microbatches=8)
    assert simulate(schedule, 4, OpTimes(shares=[0.5] * 8)) == simulate(schedule, 4)
    assert simulate(schedule, 4, OpTimes(shares=[0.5] * 7 + [1.0])).makespan > simulate(schedule, 4).makespan


# Hosts ---------------------------------------------------------------------------------------------------------------


class Device:
    """A GPU of eight hosts with four GPUs each."""

    platform = "gpu"
    device_kind = "NVIDIA H100"

    def __init__(self, number, num_slices=8):
        self.id = number
        self.process_index = number // 4
        self.slice_index = number // 4 % num_slices

    def __repr__(self):
        return str(self.id)


@pytest.mark.parametrize("num_slices", [pytest.param(8, id="hosts are slices"), pytest.param(1, id="one slice")])
@pytest.mark.parametrize(
    ("inside", "across"), [({"tensor": 4}, {"pipe": 2, "data": 4}), ({"pipe": 2, "fsdp": 2}, {"pipe": 8}), ({}, {})]
)
def test_estimates_and_meshes_place_devices_on_the_same_hosts(inside, across, num_slices):
    sizes = {axis: inside.get(axis, 1) * across.get(axis, 1) for axis in AXES}
    if not across:
        sizes |= {"data": 2, "pipe": 8, "tensor": 2}
        inside = sizes
    shape = [tuple(of.get(axis, 1) for axis in AXES) for of in (inside, across)]
    arranged = _arrange([Device(number, num_slices) for number in range(32)], *shape)
    placed = np.vectorize(lambda device: device.process_index)(arranged)
    assert (placed == hosts(tuple(sizes.items()), tuple(across.items()), 4)).all()
    if across:
        stages = np.moveaxis(placed, AXES.index("pipe"), 0).reshape(sizes["pipe"], -1)
        assert (np.diff(stages.ravel()) >= 0).all(), "the first stages have the first hosts"


def test_slices_that_are_not_there_are_an_error():
    with pytest.raises(
        MeshError, match=r"mesh.dcn \(pipe=4\): the sizes multiply to 4, and the devices are in 8 slices"
    ):
        _arrange([Device(number) for number in range(32)], (1, 8, 1, 1, 1, 1, 1), (1, 1, 1, 4, 1, 1, 1))


# Machines with different chips ---------------------------------------------------------------------------------------

SIZES = {"num_layers": 12, "hidden_size": 2048, "num_heads": 16, "intermediate_size": 8192, "vocab_size": 16000}
LARGE = RUN.model_copy(
    update={
        "model": RUN.model.model_copy(update=SIZES),
        "data": RUN.data.model_copy(update={"seq_len": 2048, "batch_size": 64}),
    }
)
FIX = ["mesh.pipe=2", "mesh.data=4", "parallel.pipeline.kind=1f1b", "num_microbatches=8", "model.remat=none"]


@cache
def planned(target, at_most=None):
    return meshpar.plan(LARGE, target, fix=FIX, at_most=at_most)


def test_slow_stages_get_fewer_layers(tmp_path):
    """An A100 has about a third of the operations a second of an H100."""
    mixed = planned("h100:1x4+a100:1x4")
    first, second = mixed.ranked[0].layout.cut
    assert first + second == 12
    assert 2 * second < first
    assert mixed.best.mesh == MeshLayout(data=4, dcn=AxisSizes(pipe=2))
    assert mixed.best.parallel.pipeline == OneFOneB(num_microbatches=8, cut=(first, second))
    text = str(mixed)
    assert f"stage 0: {first} layers, " in text
    assert f"stage 1: {second} layers and the loss, " in text
    (tmp_path / "planned.yaml").write_text(mixed.yaml())
    assert meshpar.load(tmp_path / "planned.yaml") == mixed.best


def test_a_cut_that_does_not_fit_is_narrowed():
    """Between the fastest cut, which holds too much, and the even one, which is slower."""
    wide = planned("h100:1x4+a100:1x4").ranked[0]
    limit = wide.estimate.total_bytes - 2**20
    found = planned("h100:1x4+a100:1x4", at_most=limit)
    narrow = found.ranked[0]
    assert 6 < narrow.layout.cut[0] < wide.layout.cut[0]
    assert wide.layout in [one.layout for one in found.found.too_big]
    assert narrow.estimate.total_s > wide.estimate.total_s


def test_a_step_on_different_chips_takes_longer_than_on_the_fast_ones_and_less_than_on_the_slow():
    mixed = planned("h100:1x4+a100:1x4")
    work = mixed.ranked[0].work
    fast, slow = (work.on(StatedMachine.of(targets.parse(target))).total_s for target in ("h100:2x4", "a100:2x4"))
    assert fast < mixed.ranked[0].estimate.total_s < slow


def test_without_stages_the_slowest_chip_decides():
    mixed = MixedMachine.of("h100:1x4+a100:1x4")
    one = ProductSizes("dot_general", 10**12)
    assert mixed.product_s(one) == StatedMachine.of(targets.parse("a100:1x4")).product_s(one)
    mesh = MeshLayout(data=2, pipe=4).abstract()
    assert {stage.text for stage in mixed.stages(mesh)} == {mixed.text}, "hosts in the order of the axes"
    assert [stage.text for stage in mixed.stages(mesh, (("pipe", 2),))] == ["h100:1x4"] * 2 + ["a100:1x4"] * 2


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("h100:1x4+v5e:2x2", "--target h100:1x4+v5e:2x2: TPUs of different kinds cannot run one program"),
        ("h100:1x4+a100:1x8", "--target h100:1x4+a100:1x8: hosts have 4 and 8 GPUs; all must have equally many"),
        ("h100:1x4+", "--target : not a machine; write chip:shape"),
    ],
)
def test_a_machine_of_parts_that_do_not_fit_is_an_error(target, message):
    with pytest.raises(MeshError) as error:
        meshpar.plan(RUN, target)
    assert message in str(error.value)


def test_a_layout_for_different_chips_is_compiled_for_each_kind(monkeypatch):
    """The program that holds the most counts. No compiler knows several kinds of chips in one machine."""
    held = {"h100:2x4": 60 * 2**30, "a100:2x4": 61 * 2**30}

    def inspect(run, target):
        memory = SimpleNamespace(total=held.pop(target))
        return SimpleNamespace(inspection=SimpleNamespace(memory=memory, flops=1, collectives=[]))

    monkeypatch.setattr(compiling.actions, "inspect", inspect)
    mixed = planned("h100:1x4+a100:1x4")
    found = mixed.compile(1)
    assert not held
    assert found.compiled[0].held_bytes == 61 * 2**30
    with pytest.raises(MeshError, match=r"h100:1x4\+a100:1x4: no compiler knows a machine of different chips"):
        targets.parse(mixed.machine.text)
