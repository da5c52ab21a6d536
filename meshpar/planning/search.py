"""Searches the layouts of a run: rough estimates rank all of them, and the traces of the best decide."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from textwrap import indent
from typing import Any, TypeVar

import jax

from meshpar.cost.live import peak_bytes
from meshpar.cost.traced import Collective
from meshpar.errors import ConfigError, MeshparError
from meshpar.experiment.config import Run
from meshpar.experiment.prepare import Prepared, prepare
from meshpar.parallel.strategies import Overlap
from meshpar.planning.estimate import Estimate, Work, carries_activations, operations, work_of
from meshpar.planning.layers import layers_of
from meshpar.planning.machine import Machine
from meshpar.planning.promising import narrowed
from meshpar.planning.rough import ACTIVATION_AXES, Divided, Ends, Probes, Step
from meshpar.planning.space import OVERLAPS, Layout, placements
from meshpar.train.stage_cut import message_of, product_flops

Point = TypeVar("Point")
KNOWN_UNDER_GSPMD = {"data", "fsdp"}
TRACED = 5
"""How many layouts that fit are traced, each of another mesh; three times as many if some do not fit."""
SLACK = 1.25
"""Layouts that hold this much more than the machine has, by the rough estimate, may fit all the same. The first trace
with a policy of remat and a kind of pipeline corrects the rough estimates of all others alike."""
FORWARD_AND_BACKWARD = 3
"""The products of a forward and its backward, over those of the forward."""
SMALLEST = 3
"""How many of the smallest layouts are traced if no other fits."""


@dataclass(frozen=True)
class Candidate:
    """A layout, the work of its traced step, and the estimate of it on a machine."""

    layout: Layout
    work: Work
    estimate: Estimate


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Args:
      ranked: the traced layouts that fit, the fastest first.
      too_big: the traced layouts that do not fit, the smallest first.
      rough: layout -> the rough estimate, of every layout that may fit.
      num_layouts: how many layouts were considered.
    """

    ranked: Sequence[Candidate]
    too_big: Sequence[Candidate]
    rough: Mapping[Layout, Estimate]
    num_layouts: int


def search(
    run: Run, machine: Machine, at_most: float, everything: Sequence[Layout], along_memory: bool = False,
    overlaps: Sequence[Overlap] = OVERLAPS,
) -> Found:  # fmt: skip
    """Finds the fastest of the given layouts that hold no more than `at_most` bytes on a device.

    Where GSPMD decides what is sent, only weights and gradients are known: layouts over `data` and `fsdp` are ranked by
    the rough estimates.

    Args:
      along_memory: trace layouts that no other beats in both time and memory, by the rough estimates, also several of
        the same mesh.
      overlaps: how activations may travel over `tensor`.

    Raises:
      ConfigError: none of the layouts is one that can be estimated.
    """
    probes = probe(run, everything, machine.platform)
    if probes.divided is None:
        everything = [layout for layout in everything if KNOWN_UNDER_GSPMD.issuperset(layout.mesh)]
        if not everything:
            known = " and ".join(sorted(KNOWN_UNDER_GSPMD))
            raise ConfigError(f"GSPMD decides what this run sends: only layouts over {known} can be planned")
    num_layouts = len(everything)
    if probes.divided is not None:
        refused_axes = {*ACTIVATION_AXES} - probes.divided.keys()
        everything = [layout for layout in everything if refused_axes.isdisjoint(layout.mesh)]
        if not everything:
            pairs = [Layout(((axis, 2),)) for axis in sorted(refused_axes)]
            raise ConfigError("no layout fits this run:\n" + "\n".join(refusal(run, one, machine) for one in pairs))
        everything = narrowed(everything, probes, machine, at_most)
    held = {layout: probes.states_bytes(layout) + probes.step_bytes(layout) for layout in everything}
    fitting = [layout for layout in everything if held[layout] <= SLACK * at_most]
    rough = dict(probes.best(layout, machine, overlaps) for layout in fitting)
    held |= {layout: estimate.total_bytes for layout, estimate in rough.items()}
    promising = sorted(rough, key=lambda layout: rough[layout].order)
    if along_memory:
        front = pareto(promising, rough.__getitem__)
        evenly = front[:: max(1, len(front) // TRACED)]
        promising = [*evenly, *front]
    traced: dict[Layout, Candidate] = {}
    of_mesh: Counter[Any] = Counter()
    refused: set[tuple[Any, str, str]] = set()
    corrections: dict[tuple[str | None, str, str], float] = {}
    num_traced = 0
    for layout in dict.fromkeys(promising):
        alike = (layout.remat, layout.schedule, layout.sharding)
        may_fit = held[layout] * corrections.get(alike, 1 / SLACK) <= at_most
        if of_mesh.total() == TRACED or num_traced == 3 * TRACED:
            break
        if not may_fit or (of_mesh[layout.sizes] and not along_memory):
            continue
        for one in dict.fromkeys((layout, replace(layout, overlap=overlaps[0]))):
            kind = (one.sizes, one.schedule, one.overlap)
            candidates = [] if kind in refused else _cuts(run, one, machine, probes, at_most)
            if candidates:
                traced |= {one.layout: one for one in candidates}
                last = candidates[-1]
                num_traced += 1
                of_mesh[layout.sizes] += any(one.estimate.total_bytes <= at_most for one in candidates)
                roughly = probes.states_bytes(last.layout) + probes.step_bytes(last.layout)
                corrections[alike] = last.estimate.total_bytes / roughly
                break
            refused.add(kind)
    if all(one.estimate.total_bytes > at_most for one in traced.values()):
        for layout in sorted(everything, key=held.__getitem__)[:SMALLEST]:
            if candidate := trace(run, layout, machine, probes):
                traced[layout] = candidate
    ranked = [one for one in traced.values() if one.estimate.total_bytes <= at_most]
    too_big = [one for one in traced.values() if one.estimate.total_bytes > at_most]
    ranked.sort(key=lambda one: one.estimate.order)
    too_big.sort(key=lambda one: one.estimate.total_bytes)
    return Found(ranked, too_big, rough, num_layouts)


def _cuts(run: Run, layout: Layout, machine: Machine, probes: Probes, at_most: float) -> list[Candidate]:
    """The traces of a layout with its cut, and with faster or narrower cuts by these traces. Empty if it is refused."""
    found: list[Candidate] = []
    while layout not in [one.layout for one in found] and (candidate := trace(run, layout, machine, probes)):
        found.append(candidate)
        layout = candidate.layout
        if candidate.estimate.total_bytes <= at_most:
            layout, _ = probes.balanced(layout, machine, traced=candidate.work)
        elif layout.cut:  # on every stage there is room for as many layers as on the longest
            share = (at_most - candidate.work.states_bytes) / candidate.work.step_bytes
            layout = probes.narrower(layout, machine, share)
    return found


def pareto(fastest_first: Iterable[Point], estimate: Callable[[Point], Estimate]) -> list[Point]:
    """The points that hold less than every faster one."""
    found: list[Point] = []
    least = math.inf
    for one in fastest_first:
        held = estimate(one).total_bytes
        if held < least:
            least = held
            found.append(one)
    return found


def trace(run: Run, layout: Layout, machine: Machine, probes: Probes | None = None) -> Candidate | None:
    """Prepares and traces a run in a layout; None if they do not fit each other, or what it sends is not known.

    Args:
      probes: give the work where GSPMD decides what is sent.
    """
    prepared = _prepared(run, layout, machine.platform)
    if prepared is None:
        return None
    work = probes.work(layout) if probes and probes.divided is None else work_of(prepared)
    return placed(layout, work, machine) if work else None


def placed(layout: Layout, work: Work, machine: Machine) -> Candidate:
    """A traced layout with its stages in the order of the axes, or across hosts, whichever is faster."""
    parts = placements(layout.sizes, machine.per_host)
    works = [replace(work, dcn=dcn) for dcn in parts]
    estimate, work = min(((one.on(machine), one) for one in works), key=lambda pair: pair[0].order)
    return Candidate(replace(layout, dcn=work.dcn), work, estimate)


def probe(run: Run, everything: Sequence[Layout], platform: str) -> Probes:
    """Traces the probes that these layouts need.

    Raises:
      ConfigError: the run does not fit one device.
    """
    if run.parallel.local:
        what = "layouts are compared by the trace of one step, and local updates have a second program"
        raise ConfigError(f"a run with parallel.local cannot be planned: {what}; plan it with parallel.local=null")
    remats = dict.fromkeys(layout.remat for layout in everything)
    axes = {axis for layout in everything for axis, _ in layout.sizes}
    alone = {remat: _prepared(run, Layout((), remat=remat), platform) for remat in remats}
    first = next(iter(alone.values()))
    if first is None:
        raise ConfigError("this run cannot be planned: `meshpar explain` says why it does not fit one device")
    tokens = run.data.batch_size * run.data.seq_len
    widths = run.precision.widths
    states = first.states
    elements = states.parameters // widths.params
    params = jax.tree.leaves(first.placement.params)
    stacks = [one.local_bytes for one in params if "layers" in one.spec.dims]
    stack = layers_of(run, platform)
    summed = elements * widths.sums
    steps = {remat: _step(one, tokens, summed) for remat, one in alone.items() if one}
    divided = None
    if first.countable_step is not None:
        remat, alone_step = next(iter(steps.items()))
        shares = all(layout.shares_tokens for layout in everything)
        pairs = {
            axis: Layout(((axis, 2),), remat=remat, shares_tokens=shares) for axis in ACTIVATION_AXES if axis in axes
        }
        traced = {axis: _prepared(run, pair, platform) for axis, pair in pairs.items()}
        divided = {axis: _divided(pair, alone_step) for axis, pair in traced.items() if pair}
    return Probes(
        tokens, steps, divided,
        states.parameters, elements * widths.compute, summed, states.optimizer, sum(stacks) / states.parameters,
        (len(stacks), len(params) - len(stacks)), stack or None,
        _ends(run, tokens, platform) if "pipe" in axes else Ends(),
    )  # fmt: skip


def _ends(run: Run, tokens: int, platform: str) -> Ends:
    """What a pipeline has beside layers, by the cut of the loss on two stages; nothing if the run does not fit them."""
    stack = layers_of(run, platform)
    padded_to = 2 if stack and stack.can_pad and stack.lacking(2) else 0
    pair = _prepared(run, Layout((("pipe", 2),), schedule="1f1b", num_microbatches=2, padded_to=padded_to), platform)
    parts: Any = pair.pipeline.parts if pair and pair.pipeline else None
    if parts is None:
        return Ends()
    sent = sum(x.size * x.dtype.itemsize for x in message_of(parts.cut))
    return Ends(FORWARD_AND_BACKWARD * 2 * product_flops(parts.cut.end), 2 * sent / tokens)


def _divided(pair: Prepared | None, alone: Step) -> Divided:
    """The probe of an axis of two devices; nothing if the run does not fit them."""
    step = pair.countable_step if pair else None
    if pair is None or step is None:
        return Divided()
    by_kind: dict[str, list[Collective]] = defaultdict(list)
    for one in pair.collectives(step):
        if carries_activations(one, pair):
            by_kind[one.kind].append(one)
    computes = operations(step, pair)
    share, touched = (
        2 * both / one if one else 1.0
        for both, one in ((computes.flops, alone.computes.flops), (computes.num_bytes, alone.computes.num_bytes))
    )
    products = computes * 2 if "context" in pair.mesh.shape and pair.mesh.shape["context"] > 1 else None
    return Divided([_merged(alike) for alike in by_kind.values()], share, touched, products)


def _merged(alike: Sequence[Collective]) -> Collective:
    """As many runs as those of several collectives of a kind, each of the mean size."""
    times = sum((one.times for one in alike), Fraction(0))
    total = sum(one.times * one.full_bytes for one in alike)
    return replace(alike[0], times=times, full_bytes=round(total / times))


def _step(prepared: Prepared, tokens: int, summed: int) -> Step:
    step = prepared.countable_step or prepared.gspmd_step
    return Step(operations(step, prepared), (peak_bytes(step) - summed) / tokens)


def refusal(run: Run, layout: Layout, machine: Machine) -> str:
    """Why a run does not fit a layout, by the errors that `train` would raise."""
    try:
        changed = layout.applied(run)
        prepare(changed, changed.mesh.abstract(platform=machine.platform))
    except MeshparError as error:
        return indent(f"{layout} is refused:\n{indent(str(error), '  ')}", "  ")
    return f"  what {layout} sends is not known"


def _prepared(run: Run, layout: Layout, platform: str) -> Prepared | None:
    try:
        changed = layout.applied(run)
        return prepare(changed, changed.mesh.abstract(platform=platform))
    except MeshparError:
        return None
