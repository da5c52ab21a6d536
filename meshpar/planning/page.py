"""Renders a plan as a page for a browser: one file, without scripts, fonts or links to other files.

`page.html` is the template; this module computes what it draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from meshpar.inspection.report.templates import environment
from meshpar.parallel.pipeline import gantt
from meshpar.parallel.pipeline.get_schedule import get_schedule
from meshpar.planning.alternatives import shown
from meshpar.planning.estimate import Estimate, timeline
from meshpar.planning.machine import Machine
from meshpar.planning.plan import Plan, loses_by
from meshpar.planning.search import Candidate
from meshpar.planning.space import Layout
from meshpar.tree import human_bytes, human_time

# The box of the points, in per cent of the width and in px of the height; axes are logarithmic.
_WIDTH = 100.0
_TOP = 12.0
_HEIGHT = 320.0
_COLOURS = ("m0", "m2", "m4", "m1", "m3", "m5", "temporaries", "outputs", "rest")
_KINDS = {"parameters and optimizer's state": "m0", "gradients, activations and what is gathered": "m5"}
_SECOND = 1.0
_SHOWN = 0.002
"""A term of a smaller share of the step is drawn, but not written."""
_MOST_MICROBATCHES = 32
"""A schedule with more microbatches is drawn with this many."""


@dataclass(frozen=True)
class _Scale:
    """A logarithmic axis."""

    least: float
    most: float
    start: float
    length: float

    def at(self, value: float) -> float:
        span = math.log(self.most / self.least) or 1.0
        return round(self.start + self.length * math.log(value / self.least) / span, 1)

    def ticks(self, unit: float) -> list[float]:
        """Two to nine round values, in a unit: 1, 2, 5, 10, ... of it, or multiples of one of these."""
        powers = [unit * digit * 10.0**power for power in range(-9, 10) for digit in (1, 2, 5)]
        if len(found := self._inside(powers)) > 2:
            return found
        multiples = (
            [step * i for i in range(math.ceil(self.least / step), math.floor(self.most / step) + 1)]
            for step in powers
            if self.most / step < 1000
        )
        return next((found for found in multiples if 1 < len(found) < 10), [self.least])

    def _inside(self, values: Iterable[float]) -> list[float]:
        return [value for value in values if self.least <= value <= self.most]


def page(plan: Plan, origin: str = "", command: str = "") -> str:
    """The page of a plan, a whole HTML document.

    Args:
      origin: the command, version and date of the plan.
      command: what trains the run that was planned, to which each layout adds its words; empty without a config file.
    """
    found = plan.found
    traced = {one.layout: one.estimate for one in [*found.ranked, *found.too_big]}
    every = {**found.rough, **traced}
    times = _Scale(min(e.total_s for e in every.values()), max(e.total_s for e in every.values()), 0.0, _WIDTH)
    sizes = [estimate.total_bytes for estimate in every.values()]
    memory = _Scale(min(sizes), max(sizes), _TOP + _HEIGHT, -_HEIGHT)
    held = {f"{rank}. {one.layout}": one.estimate for rank, one in enumerate(plan.ranked, 1)}
    held |= {f"does not fit: {one.layout}": one.estimate for one in found.too_big[:1]}
    terms = dict.fromkeys(term for one in plan.ranked for term in one.estimate.terms)
    colours = {term: _COLOURS[i % len(_COLOURS)] for i, term in enumerate(terms)}
    return (
        environment(Path(__file__).parent)
        .get_template("page.html")
        .render(
            title=plan.machine.text,
            num_layouts=found.num_layouts,
            num_too_big=len(found.too_big),
            at_most=human_bytes(plan.at_most),
            rows=[_row(one, colours, plan.ranked[0]) for one in plan.ranked],
            slowest=max(one.estimate.total_s for one in plan.ranked),
            colours=colours,
            held=[_held(name, estimate, plan.at_most) for name, estimate in held.items()],
            at_most_bytes=plan.at_most,
            most_held=max(plan.at_most, *(estimate.total_bytes for estimate in held.values())),
            kinds=_KINDS,
            commands=[f"{command} {one.layout}" for one in plan.ranked] if command else [],
            points=list(_points(plan, every, traced, times, memory)),
            time_ticks=[{"at": times.at(value), "text": _round(human_time(value))} for value in times.ticks(_SECOND)],
            memory_ticks=[
                {"at": memory.at(value), "text": _round(human_bytes(value))}
                for value in memory.ticks(_unit(memory.most))
            ],
            limit_y=memory.at(plan.at_most) if memory.least <= plan.at_most <= memory.most else None,
            alternatives=plan.alternatives,
            helps=plan.helps,
            costs=plan.costs,
            figures=[f"{shown(one.value)} {one.name}" for one in plan.machine.figures],
            schedule=_schedule(plan.ranked[0], plan.machine),
            origin=origin,
            config=plan.yaml(),
        )
    )


def _unit(num_bytes: float) -> float:
    """The unit in which bytes are printed."""
    return 1024.0 ** min(3, math.floor(math.log(num_bytes, 1024)))


def _round(text: str) -> str:
    """A round value without decimals that are zero: 10.00 GiB as 10 GiB."""
    number, _, unit = text.partition(" ")
    return f"{float(number):g} {unit}"


def _points(
    plan: Plan, every: dict[Layout, Estimate], traced: dict[Layout, Estimate], times: _Scale, memory: _Scale
) -> Iterator[dict[str, Any]]:
    """The layouts as points, the traced ones on top. Of rough estimates at the same place, the first is drawn."""
    taken: set[tuple[int, int]] = set()
    for layout, estimate in sorted(every.items(), key=lambda item: item[0] in traced):
        x = times.at(estimate.total_s)
        y = memory.at(estimate.total_bytes)
        place = (round(2 * x), round(y / 5))
        if layout not in traced and place in taken:
            continue
        taken.add(place)
        kind = "traced" if layout in traced else ""
        if estimate.total_bytes > plan.at_most:
            kind += " big"
        if layout == plan.ranked[0].layout:
            kind = "best"
        title = f"{layout}\n{human_time(estimate.total_s)}, {human_bytes(estimate.total_bytes)}"
        yield {"x": x, "y": y, "kind": kind.strip(), "title": title}


def _row(one: Candidate, colours: dict[str, str], best: Candidate) -> dict[str, Any]:
    start = 0.0
    count = one.layout.num_microbatches
    parts: list[dict[str, Any]] = []
    for term, seconds in one.estimate.terms.items():
        title = f"{term}: {human_time(seconds)}"
        parts.append({"start": start, "seconds": seconds, "colour": colours[term], "title": title})
        start += seconds
    return {
        "layout": str(one.layout),
        "mesh": ", ".join(f"{axis} {size}" for axis, size in one.layout.sizes) or "one device",
        "more": f"{', '.join(one.layout.presets)}; {count} microbatch{'es' if count > 1 else ''}",
        "step": human_time(one.estimate.total_s),
        "behind": f"{one.estimate.total_s / best.estimate.total_s - 1:+.1%}, by {loses_by(one, best)}"
        if one is not best
        else "",
        "holds": human_bytes(one.estimate.total_bytes),
        "terms": "; ".join(
            f"{human_time(seconds)} {term}"
            for term, seconds in one.estimate.terms.items()
            if seconds >= _SHOWN * one.estimate.total_s
        ),
        "parts": parts,
    }


def _held(name: str, estimate: Estimate, at_most: int) -> dict[str, Any]:
    sizes = (estimate.states_bytes, estimate.step_bytes)
    starts = (0, estimate.states_bytes)
    parts = [
        {"start": start, "size": size, "colour": colour, "title": f"{kind}: {human_bytes(size)}"}
        for (kind, colour), start, size in zip(_KINDS.items(), starts, sizes, strict=True)
    ]
    left = at_most - estimate.total_bytes
    over = f"{human_bytes(left)} left" if left >= 0 else f"{human_bytes(-left)} too many"
    return {"name": name, "holds": human_bytes(estimate.total_bytes), "left": over, "parts": parts}


def _schedule(one: Candidate, machine: Machine) -> Markup | None:
    """The picture of a pipeline's schedule, with the times of its stages."""
    layout = one.layout
    if not layout.schedule:
        return None
    num_stages = layout.size("pipe")
    shown = min(layout.num_microbatches, max(num_stages, _MOST_MICROBATCHES // num_stages * num_stages))
    schedule = get_schedule(layout.schedule, num_stages, shown)
    busy = [each.total for each in one.work.busy(machine)]
    shares = [each / max(busy) for each in busy] if len(busy) > 1 else ()
    drawn = timeline(schedule, num_stages, layout.remat == "full", shares)
    return Markup(gantt.svg(drawn, f"{layout.schedule}: {num_stages} stages, {shown} microbatches"))
