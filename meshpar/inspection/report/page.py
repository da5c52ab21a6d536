"""Renders an inspection as a page for a browser: one file, without scripts, fonts or links to other files.

`page.html` is the template; this module computes the figures in it. The widths of all bars are percentages of the
page's width, so they are to scale on a screen of any size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from meshpar.inspection.program.hlo import KINDS
from meshpar.inspection.report.places import axes_name, places, short_source, times_text
from meshpar.inspection.report.plain import PlainCollective, PlainInspection, plain
from meshpar.inspection.report.templates import environment
from meshpar.mesh.layout import describe_sizes
from meshpar.tree import human_bytes

# The least width of the bars in px on a narrow screen, and on one wider than 700 px; page.css sets both.
_NARROW_PX = 340
_WIDE_PX = 700


def page(inspection: Mapping[str, Any], origin: str = "", config: str = "") -> str:
    """Renders the page of an `Inspection` or a `FitReport`.

    Args:
      inspection: the plain data of `as_json()`, or of a file that `meshpar inspect --json` wrote.

      origin: the command, version and date of the program.
      config: the config of its run.

    Returns:
      A whole HTML document. All names from the user's program are escaped.
    """
    report = plain(inspection)
    templates = environment()
    templates.filters |= {"room": _room, "tooltip": _tooltip}
    mesh = f"mesh: {describe_sizes(report.mesh)}" if report.mesh else "no mesh was given"
    seconds = report.products_s_estimate
    at_least = "" if seconds is None else f", {1e3 * seconds:.3g} ms at the chip's peak"
    return templates.get_template("page.html").render(
        report=report,
        mesh=mesh,
        at_least=at_least,
        sends=_sends(report),
        order=_order(report.collectives),
        memory=_memory(report),
        places=places(report.collectives),
        human_bytes=human_bytes,
        origin=origin,
        config=config,
    )


def _sends(report: PlainInspection) -> dict[str, Any]:
    """The bytes sent over each combination of axes, by the compiled and by the traced program."""
    form = report.traced_bytes_per_axis or {}
    all_axes = list(dict.fromkeys([*report.sent_bytes_per_axis, *form]))
    sent = {axes: report.sent_bytes_per_axis.get(axes, 0) for axes in all_axes}
    traced = {axes: form.get(axes, 0) for axes in all_axes} if form else {}
    against = {axes: _against(sent[axes], traced[axes]) if traced else "" for axes in all_axes}
    most = max([*sent.values(), *traced.values()], default=0)
    return {"sent": sent, "traced": traced, "against": against, "most": most}


def _against(sent: int, traced: int) -> str:
    if sent == traced:
        change = "equal"
    elif traced:
        change = f"{(sent - traced) / traced:+.1%}"
    else:
        change = "not traced"
    return f"/ as traced {traced:,}, {change}"


def _order(collectives: Iterable[PlainCollective]) -> dict[str, Any]:
    """The collectives by axes, each with the bytes sent before it, and the colours of the kinds."""
    found = list(collectives)
    starts = list(accumulate((one.total_bytes for one in found), initial=0.0))
    lanes: dict[str, list[tuple[float, PlainCollective]]] = defaultdict(list)
    for start, one in zip(starts, found, strict=False):
        lanes[axes_name(one.axes, one.is_in_parts)].append((start, one))
    colours = {kind: kind if kind in KINDS.values() else "other" for kind in sorted({one.kind for one in found})}
    return {"lanes": lanes, "sent_bytes": starts[-1], "colours": colours}


class _Part(NamedTuple):
    """One kind of memory; `colour` is the name of a colour in page.css."""

    name: str
    num_bytes: int
    colour: str
    start: int


def _memory(report: PlainInspection) -> dict[str, Any]:
    """The kinds of memory, with the bytes before each, and the marks on their bar."""
    kinds = report.memory.kinds()
    colours = {"other arguments": "rest", "outputs": "outputs", "temporaries": "temporaries"}
    starts = list(accumulate(kinds.values(), initial=0))
    marks = {"the peak": report.memory.peak, "the chip's memory": report.chip_bytes}
    named = [f"{name}, {human_bytes(num_bytes)}" for name, num_bytes in marks.items() if num_bytes]
    return {
        "parts": [
            _Part(name, size, colours.get(name, f"m{i % 6}"), start)
            for i, ((name, size), start) in enumerate(zip(kinds.items(), starts, strict=False))
        ],
        "num_bytes": starts[-1],
        "capacity": max(starts[-1], report.memory.total, report.chip_bytes or 0),
        "marks": [num_bytes for num_bytes in marks.values() if num_bytes],
        "note": f" The marks: {'; '.join(named)}." if named else "",
    }


# Filters of the template ------------------------------------------------------------------------------------------


def _room(one: PlainCollective, all_sent: float) -> str:
    """The screens on which a block has room for its `12x`: `any`, only `wide` ones, or none (empty)."""
    share = one.total_bytes / all_sent if all_sent else 0
    needed_px = 7 * len(times_text(one.times)) + 8
    if one.times == 1 or share * _WIDE_PX < needed_px:
        return ""
    return "any" if share * _NARROW_PX >= needed_px else "wide"


def _tooltip(one: PlainCollective) -> str:
    """The facts about a collective, one per line."""
    lines = [
        f"{one.kind} over {axes_name(one.axes, one.is_in_parts)}",
        f"{times_text(one.times)} {human_bytes(one.sent_bytes)} = {human_bytes(one.total_bytes)}",
        ", ".join(one.tensors or one.arrays),
        "in a branch of a conditional" if one.branches else "",
        short_source(one.source),
    ]
    return "\n".join(filter(None, lines))
