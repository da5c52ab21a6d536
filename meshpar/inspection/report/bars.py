"""Bars as inline SVG, whose widths are shares of the page's: they are to scale on a screen of any size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from meshpar.inspection.program.hlo import KINDS
from meshpar.inspection.report.places import axes_name, short_source
from meshpar.inspection.report.plain import PlainCollective
from meshpar.tree import human_bytes

_NARROW_PX, _WIDE_PX = 340, 700
"""What the bars span at least on a narrow screen, and on one over 700 px, as the style has it."""


@dataclass(frozen=True)
class Part:
    """A part of a stack; `colour` names one of the style's."""

    name: str
    num_bytes: float
    colour: str


def pair(sent: int, traced: int | None, most: int) -> str:
    """A bar of the bytes that are sent, and a thin one of those that the program says; `most` spans the whole width."""
    bars = [_rect("track", 0, most, most, 0, 12), _rect("sent", 0, sent, most, 0, 12)]
    bars += [] if traced is None else [_rect("form", 0, traced, most, 14, 4)]
    return _svg(18 if traced is not None else 12, bars, "bars")


def stack(parts: Sequence[Part], whole: float, marks: Iterable[float] = ()) -> str:
    """Parts beside each other, in a width of `whole` bytes; marks stand where so many bytes end."""
    bars, start = [_rect("track", 0, whole, whole, 4, 26)], 0.0
    for part in parts:
        title = f"<title>{escape(part.name)}: {human_bytes(part.num_bytes)}</title>"
        bars.append(_rect("part", start, part.num_bytes, whole, 4, 26, f'style="fill: var(--{part.colour})"', title))
        start += part.num_bytes
    at = (_share(mark, whole) for mark in marks)
    bars += [f'<rect class="mark" x="{x}" y="0" width="2" height="34" transform="translate(-2 0)"/>' for x in at]
    return _svg(34, bars, "stack")


def lane(blocks: Iterable[tuple[float, PlainCollective]], whole: float) -> str:
    """Collectives as blocks, each from where it starts; both it and its width are in bytes of `whole`."""
    track = _rect("track", 0, whole, whole, 10, 2)
    return _svg(22, [track, *(_block(start, one, whole) for start, one in blocks)], "lane")


def colour_of(kind: str) -> str:
    """The name of a kind's colour; what is not known here has one in common."""
    return kind if kind in KINDS.values() else "other"


def _block(start: float, one: PlainCollective, whole: float) -> str:
    size = one.total_bytes
    fill = f'style="fill: var(--{colour_of(one.kind)})"'
    # The edge is seen, and pointed at, where the block itself is narrower than the screen can show.
    edge = f'<rect x="{_share(start, whole)}" y="0" width="1.5" height="22" {fill}/>'
    parts = [f"<title>{escape(_told(one))}</title>", _rect("bar", start, size, whole, 0, 22, fill), edge]
    parts += [_rect("hatch", start, size, whole, 0, 22)] * bool(one.branches)
    return f'<g class="block">{"".join(parts)}{_repeats(start, one, whole)}</g>'


def _repeats(start: float, one: PlainCollective, whole: float) -> str:
    """`12x`, if the block is wide enough for it: on a wide screen, or on any."""
    label = f"{one.times}x"
    share, needed_px = one.total_bytes / whole, 7 * len(label) + 8
    if one.times == 1 or share * _WIDE_PX < needed_px:
        return ""
    screens = "" if share * _NARROW_PX >= needed_px else ' class="wide"'
    return f'<text x="{_share(start, whole)}" dx="5" y="15"{screens}>{label}</text>'


def _told(one: PlainCollective) -> str:
    """A collective in words, a line for each thing that is known of it."""
    total, each = human_bytes(one.total_bytes), human_bytes(one.sent_bytes)
    lines = [
        f"{one.kind} over {axes_name(one.axes)}",
        f"{one.times}x {each} = {total}",
        ", ".join(one.tensors or one.arrays),
        "in a branch of a conditional" * bool(one.branches),
        short_source(one.source),
    ]
    return "\n".join(filter(None, lines))


def _rect(
    name: str, start: float, size: float, whole: float, y: int, height: int, style: str = "", inner: str = ""
) -> str:
    place = f'x="{_share(start, whole)}" y="{y}" width="{_share(size, whole)}" height="{height}"'
    return f'<rect class="{name}" {place} {style}>{inner}</rect>'


def _share(size: float, whole: float) -> str:
    return f"{100 * size / whole if whole else 0:.5g}%"


def _svg(height: int, parts: Iterable[str], name: str) -> str:
    return f'<svg class="{name}" height="{height}">{"".join(parts)}</svg>'
