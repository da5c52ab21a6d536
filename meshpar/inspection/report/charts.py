"""What the page draws: bytes over each combination of axes, the collectives in order, and what a device holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from html import escape
from itertools import accumulate

from meshpar.inspection.report.bars import Part, colour_of, lane, pair, stack
from meshpar.inspection.report.markup import number, row, section, swatch, table, word
from meshpar.inspection.report.places import axes_name
from meshpar.inspection.report.plain import PlainCollective, PlainInspection, PlainMemory
from meshpar.tree import human_bytes

_ORDER = (
    "In the order of the program, from left to right. A block is as wide as the bytes that a device sends in all its "
    "executions: this is an order, and no clock. A number is how often a loop runs it."
)


def sent(it: PlainInspection) -> str:
    """A bar for each combination of axes, and one of the bytes that the traced program says."""
    sent, form = it.sent_bytes_per_axis, it.traced_bytes_per_axis or {}
    most = max([*sent.values(), *form.values()], default=0)
    rows = []
    for axes in dict.fromkeys([*sent, *form]):
        here, its_form = sent.get(axes, 0), form.get(axes, 0) if form else None
        more = "" if its_form is None else f"/ as traced {its_form:,}, {_against(here, its_form)}"
        rows.append(row(axes, f"{here:,} bytes", more, pair(here, its_form, most)))
    note = "Bytes that a device sends in a step, over each combination of axes."
    note += " The thin bar is what the traced program says." if form else ""
    return section("Sends", note, "".join(rows) or "<p>It sends nothing.</p>")


def order(found: tuple[PlainCollective, ...]) -> str:
    """The collectives in the order of the program, a lane for each combination of axes."""
    ends = list(accumulate((one.total_bytes for one in found), initial=0.0))
    lanes: dict[str, list[tuple[float, PlainCollective]]] = defaultdict(list)
    for start, one in zip(ends, found, strict=False):
        lanes[axes_name(one.axes)].append((start, one))
    rows = [row(axes, _count(len(blocks)), "", lane(blocks, ends[-1])) for axes, blocks in lanes.items()]
    return section("Collectives in order", _ORDER, "".join(rows) + _legend(found) if rows else "")


def held(memory: PlainMemory, chip_bytes: int | None) -> str:
    """The kinds of memory stacked, against the chip's where there is one."""
    parts = _parts(memory)
    together = sum(part.num_bytes for part in parts)
    said = [f"the peak, {human_bytes(memory.peak)}"] if memory.peak else []
    said += [f"the chip's memory, {human_bytes(chip_bytes)}"] if chip_bytes else []
    note = "Bytes on a device, stacked." + (f" The marks: {'; '.join(said)}." if said else "")
    rows = [
        word(part.name, part.colour) + number(human_bytes(part.num_bytes)) + number(f"{part.num_bytes / together:.1%}")
        for part in parts
    ]
    whole, marks = max(together, memory.total, chip_bytes or 0), filter(None, (memory.peak, chip_bytes))
    return section("Holds", note, stack(parts, whole, marks) + table(rows, "short"))


def _against(sent: int, form: int) -> str:
    if sent == form:
        return "equal"
    return f"{(sent - form) / form:+.1%}" if form else "beyond it"


def _count(number: int) -> str:
    return f"{number} collective{'s' * (number != 1)}"


def _legend(found: Iterable[PlainCollective]) -> str:
    keys = [swatch(colour_of(kind)) + escape(kind) for kind in sorted({one.kind for one in found})]
    if any(one.branches for one in found):
        keys.append('<span class="swatch branch"></span>in a branch: runs only if that is taken')
    return f'<ul class="legend small">{"".join(f"<li>{key}</li>" for key in keys)}</ul>'


def _parts(memory: PlainMemory) -> list[Part]:
    """The arguments by their place, those of less than a thousandth together; outputs and temporaries."""
    small = {name: size for name, size in memory.arguments.items() if size < memory.total / 1000}
    large = (item for item in memory.arguments.items() if item[0] not in small)
    parts = [Part(name, size, f"m{i % 6}") for i, (name, size) in enumerate(large)]
    parts += [Part("other arguments", sum(small.values()), "rest"), Part("outputs", memory.outputs, "outputs")]
    parts += [Part("temporaries", memory.temporaries, "temporaries")]
    return [part for part in parts if part.num_bytes]
