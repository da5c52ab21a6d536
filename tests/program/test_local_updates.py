"""A step of slices that train alone sends nothing across them; the outer step sends the parameters once."""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction
from typing import Any

import jax
import pytest

from meshpar.cost.traced import traced_collectives, traffic
from meshpar.experiment.prepare import Prepared, prepare
from meshpar.inspection.program.hlo import collectives_of
from meshpar.mesh.hardware import Link, Links
from meshpar.mesh.layout import MeshLayout
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.rounds import Rounds
from meshpar.parallel.strategies import Parallel
from meshpar.planning.estimate import work_of
from meshpar.planning.machine import StatedMachine
from meshpar.train.local_step import LocalStep
from meshpar.tree import flatten_with_paths
from tests.program.oracle import share
from tests.program.test_bytes import ROWS, as_written, prepared, sent_over

EVERY = 5
INSIDE = {
    "zero3_tensor": ({"fsdp": 2, "tensor": 2}, ["fsdp", "megatron"]),
    "zero1": ({"fsdp": 4}, ["zero1"]),
    "zero2_data": ({"data": 2, "fsdp": 2}, ["zero2"]),
    "tensor_sp": ({"tensor": 4}, ["megatron_sp"]),
}


def sliced(layout: str, run: dict[str, Any] | None = None, **settings: Any) -> Prepared:
    sizes, presets = INSIDE[layout]
    local = {"every": EVERY, "outer": "nesterov"} | settings
    return prepared(({"replica": 2} | sizes, presets), parallel={"local": local}, **run or {})


def parameter_bytes(run: Prepared) -> int:
    """Of the shards on a device, in float32."""
    return sum(placement.local_bytes for placement in jax.tree.leaves(run.placement.sharded))


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if i else []) for i, name in enumerate(INSIDE)]
)
def test_bytes_across_slices_are_those_of_the_parameters_once_a_round(layout):
    run = sliced(layout)
    step = as_written(run)
    assert isinstance(step, LocalStep)
    inner = sent_over(collectives_of(step.compiled, run.mesh))
    (end,) = step.outer
    outer = sent_over(collectives_of(end.compiled, run.mesh))
    assert not any("replica" in axes for axes in inner)
    assert inner == traffic(run.collectives(step.program.jaxpr))
    assert outer["replica",] == 2 * share(2, parameter_bytes(run))
    assert outer == traffic(run.collectives(end.jaxpr))
    assert {axes: num_bytes for axes, num_bytes in outer.items() if axes != ("replica",)} == inside_outer(run, layout)
    a_step = {axes: inner.get(axes, 0) + outer.get(axes, 0) / Fraction(EVERY) for axes in {*inner, *outer}}
    assert run.traced_bytes == a_step


def inside_outer(run: Prepared, layout: str) -> dict[Any, Fraction]:
    """ZeRO-1 gathers the parameters after the outer update, as after any."""
    stored = sum(one.local_bytes for one in jax.tree.leaves(run.placement.params))
    sharded = [one.axes != () and "fsdp" in sum(one.axes, ()) for one in jax.tree.leaves(run.placement.sharded)]
    assert layout != "zero1" or all(sharded)
    return {("fsdp",): share(4, stored)} if layout == "zero1" else {}


@pytest.mark.slow
@pytest.mark.parametrize("layout", INSIDE)
def test_inside_a_slice_a_step_sends_what_it_sends_without_the_other_slices(layout):
    """Half of the batch on half of the mesh."""
    run = sliced(layout)
    sizes, _ = INSIDE[layout]
    half = run.run.data.model_copy(update={"batch_size": ROWS // 2})
    mesh = MeshLayout(**sizes)
    alone = run.run.model_copy(update={"data": half, "mesh": mesh, "parallel": Parallel()})
    assert traffic(run.collectives(run._traced_step)) == prepare(alone, mesh.abstract()).traced_bytes


def test_control_a_sum_over_slices_in_a_step_is_counted(monkeypatch):
    monkeypatch.setattr(ParallelContext, "in_slice", property(lambda self: self))
    run = sliced("zero3_tensor")
    assert any("replica" in axes for axes in traffic(run.collectives(run._traced_step)))


@pytest.mark.slow
def test_int8_sends_a_byte_an_element_and_a_scale_a_block():
    """Each of two slices sends one half of the differences, and its half of the sum."""
    run = sliced("zero3_tensor", compress={"kind": "int8", "block": 64})
    sizes: dict[Any, int] = defaultdict(int)
    for one in jax.tree.leaves(run.placement.sharded):
        sizes[frozenset(sum(one.axes, ()))] += math.prod(one.local_shape)
    blocks = sum(math.ceil(size / 2 / 64) for size in sizes.values())
    assert (run.traced_bytes or {})["replica",] == Fraction(2 * blocks * (64 + 4), EVERY)


@pytest.mark.parametrize("layout", ["zero3_tensor", pytest.param("zero1", marks=pytest.mark.slow)])
def test_an_overlapped_round_sends_the_same_bytes_in_the_step_after_it(layout):
    run = sliced(layout, {"num_steps": EVERY + 2}, overlap_steps=2)
    step = as_written(run)
    assert isinstance(step, LocalStep)
    (reducing,) = step.reducing
    (end,) = step.outer
    beside = sent_over(collectives_of(reducing.compiled, run.mesh))
    inner = sent_over(collectives_of(step.compiled, run.mesh))
    assert beside == inner | {("replica",): 2 * share(2, parameter_bytes(run))}
    assert sent_over(collectives_of(end.compiled, run.mesh)) == inside_outer(run, layout)
    assert run.traced_bytes == sliced(layout).traced_bytes


def test_rounds_that_grow_send_the_parameters_once_in_each_of_them():
    """Rounds that begin at 1, 5/6, 4/6 and 2/6 of the learning rate; the last one is cut short."""
    optim = {"kind": "sgd", "lr": 0.5, "schedule": {"kind": "linear"}}
    run = sliced("zero3_tensor", {"optim": optim, "num_steps": 6}, every=1, growth=0.5)
    assert run.rounds == Rounds((1, 2, 4, 6))
    assert (run.traced_bytes or {})["replica",] == 2 * share(2, parameter_bytes(run)) * Fraction(4, 6)


def test_the_planner_counts_the_seconds_of_outer_steps():
    """On links without latency: the bytes over the bandwidth. One step in a round hides them if they overlap."""
    link = Link(bytes_per_s=1e6, latency_s=0.0)
    machine = StatedMachine("slow", 8, 8, 1e9, 1e9, Links(inside=link, across=link))
    run = sliced("zero3_tensor")
    seconds = 2 * share(2, parameter_bytes(run)) / EVERY / 1e6
    work = work_of(run)
    overlapped = work_of(sliced("zero3_tensor", {"num_steps": EVERY + 2}, overlap_steps=2))
    assert work is not None and overlapped is not None
    found = work.on(machine).terms
    assert found["outer steps"] == pytest.approx(float(seconds), rel=1e-9)
    hidden = overlapped.on(machine).terms["products"] / EVERY
    assert overlapped.on(machine).terms["outer steps"] == pytest.approx(float(seconds) - hidden, rel=1e-9)


@pytest.mark.slow
def test_fragments_send_the_same_bytes_in_turn():
    """Of three layers the first fragment has two; the second has one, and the parameters outside of the layers."""
    run = sliced("zero3_tensor", every=10, fragments=2)
    sent = [traffic(traced_collectives(traced.jaxpr)) for traced in run.slices.trace_outer()]
    blocks = {path: one for path, one in flatten_with_paths(run.placement.sharded).items() if "layers" in one.spec.dims}
    of_layers = 2 * share(2, sum(one.local_bytes for one in blocks.values()))
    assert sent[0] == {("replica",): of_layers * 2 / 3}
    assert sent[1] == {("replica",): 2 * share(2, parameter_bytes(run)) - of_layers * 2 / 3}
    assert run.traced_bytes == sliced("zero3_tensor", every=10).traced_bytes
