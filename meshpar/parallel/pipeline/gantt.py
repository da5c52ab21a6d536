"""Draws a timeline: one row per stage, time to the right."""

from __future__ import annotations

import math
from html import escape

from meshpar.parallel.pipeline.simulate import TimedOp, Timeline

COLOURS = {"F": "#4c78a8", "B": "#f58518", "W": "#54a24b"}
WHOLE = {"F": "forward", "B": "backward"}
SPLIT = {"F": "forward", "B": "backward, input", "W": "backward, weights"}
# Pixels: the shortest operation, a row, the left margin, and the least width, which the last line needs.
_UNIT = 22
_ROW = 26
_LEFT = 72
_LEAST = 720
# Light by its attributes; this makes it dark where the page or the machine is, also for an `<img>`.
_DARK = (
    "<style>@media (prefers-color-scheme: dark) { .gantt .paper { fill: #0d1117; } .gantt .ink { fill: #e6edf3; }"
    " .gantt .op { stroke: #0d1117; } }</style>"
)


def text(timeline: Timeline, width: int = 120) -> str:
    """Draws in letters: F, B and W where they begin, `-` while they last, `.` where a stage waits.

    Args:
      width: columns. Without room for the numbers of microbatches, letters repeat while an operation lasts, and those
        of every second chunk are lowercase. Without room for that, time is coarser, and the last line reports how
        many operations are shown.
    """
    step = min((one.end - one.start for one in timeline.ran if one.end > one.start), default=1.0)
    columns = round(timeline.makespan / step)
    digits = max(len(_name(one)) for one in timeline.ran)
    cell = digits + 1 if columns * (digits + 1) + 10 <= width else 1
    is_coarse = columns * cell + 10 > width
    if is_coarse:
        step *= math.ceil((columns + 10) / width)
    rows = [_columns(mine, timeline.makespan, step, is_coarse) for mine in timeline.stages]
    lines = [f"stage {i:<3} {_drawn(row, cell)}" for i, row in enumerate(rows)]
    num_shown = sum(len(set(row) - {None}) for row in rows)
    if num_shown < len(timeline.ran):
        lines.append(f"{num_shown} of {len(timeline.ran)} operations are shown; a wider terminal shows all")
    return "\n".join(lines)


def _columns(mine: list[TimedOp], makespan: float, step: float, is_coarse: bool) -> list[TimedOp | None]:
    """The operation of a stage in each column. Each has a column of its own, unless time is coarse."""
    columns: list[TimedOp | None] = [None] * math.ceil(makespan / step - 1e-9)
    free = 0
    for one in mine:
        first = _column(one.start, step) if is_coarse else max(free, _column(one.start, step))
        free = max(first + 1, _column(one.end, step))
        columns += [None] * (free - len(columns))
        columns[first:free] = [one] * (free - first)
    return columns


def _column(time: float, step: float) -> int:
    """The nearest column; the later one of two, so that operations that last one step never share a column."""
    return math.floor(time / step + 0.5 + 1e-9)


def _drawn(columns: list[TimedOp | None], cell: int) -> str:
    cells: list[str] = []
    before = None
    for one in columns:
        if one is None:
            text = "."
        elif cell == 1:
            text = one.op.kind.lower() if one.op.chunk % 2 else one.op.kind
        else:
            text = "-" if one is before else _name(one)
        cells.append(text[:cell].ljust(cell))
        before = one
    return "".join(cells).rstrip()


def _name(one: TimedOp) -> str:
    """The name with an apostrophe for the second chunk, two for the third."""
    return f"{one.op.kind}{one.op.microbatch}" + "'" * one.op.chunk


def summary(timeline: Timeline) -> str:
    """The numbers of a timeline, in one line."""
    return (
        f"makespan {timeline.makespan:g}   busy {timeline.work:g}   bubble {timeline.bubble:.4f}"
        f"   idle in one step {timeline.idle:.4f}   activations held {timeline.peak:g}"
    )


def svg(timeline: Timeline, title: str) -> str:
    """Draws a self-contained SVG document, with a legend and an axis of time; second chunks are lighter.

    On a dark page it is dark, if the reader's program knows `prefers-color-scheme`, as browsers do.
    """
    shortest = min((one.end - one.start for one in timeline.ran if one.end > one.start), default=1.0)
    unit = _UNIT / shortest
    width = max(round(_LEFT + unit * timeline.makespan + 16), _LEAST)
    height = _ROW * (timeline.num_stages + 4)
    stages = [_text(8, _y(i) + 16, f"stage {i}") for i in range(timeline.num_stages)]
    boxes = [_box(one, unit) for one in timeline.ran]
    foot = _text(8, height - 10, summary(timeline))
    body = "\n".join([_text(8, 18, title), *_legend(timeline, width), *stages, *boxes, *_axis(timeline, unit), foot])
    box = f'class="gantt" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    paper = f'<rect class="paper" width="{width}" height="{height}" rx="6" fill="#ffffff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n{_DARK}\n{paper}\n{body}\n</svg>\n'


def _legend(timeline: Timeline, width: int) -> list[str]:
    """A square and words for each kind of operation, at the right."""
    drawn = []
    x = width - 8
    meanings = SPLIT if any(one.op.kind == "W" for one in timeline.ran) else WHOLE
    for kind, meaning in reversed(meanings.items()):
        words = f"{kind}: {meaning}"
        x -= 7 * len(words) + 30
        drawn += [f'<rect x="{x}" y="8" width="12" height="12" fill="{COLOURS[kind]}"/>', _text(x + 17, 18, words, 11)]
    return drawn


def _axis(timeline: Timeline, unit: float) -> list[str]:
    """A line below the stages with times, in units of the simulation."""
    y = _y(timeline.num_stages) + 4
    end = _LEFT + unit * timeline.makespan
    drawn = [f'<path d="M{_LEFT} {y}H{end:.1f}" stroke="#888888"/>', _text(8, y + 14, "time", 11)]
    apart = _tick(60 / unit)
    for i in range(math.floor(timeline.makespan / apart + 1e-9) + 1):
        x = _LEFT + unit * i * apart
        drawn += [f'<path d="M{x:.1f} {y}v4" stroke="#888888"/>', _text(round(x) - 3, y + 16, f"{i * apart:g}", 11)]
    return drawn


def _tick(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... and their tenths, hundredths, ... that is no less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


def _y(stage: int) -> int:
    return _ROW * (stage + 1) + 4


def _box(one: TimedOp, unit: float) -> str:
    x = _LEFT + unit * one.start
    width = unit * (one.end - one.start)
    colour = _lighter(COLOURS[one.op.kind], 1 / (1 + 0.5 * one.op.chunk))
    rect = (
        f'<rect class="op" x="{x:.1f}" y="{_y(one.stage)}" width="{width:.1f}" height="{_ROW - 4}" fill="{colour}"'
        f' stroke="#ffffff"><title>{escape(str(one.op))}</title></rect>'
    )
    return rect + _text(round(x + 4), _y(one.stage) + 15, str(one.op.microbatch), 11, "label")


def _lighter(colour: str, share: float) -> str:
    """The colour mixed with white. Opacity would mix it with the page."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - share * (255 - part)):02x}" for part in parts)


def _text(x: int, y: int, words: str, size: int = 13, kind: str = "ink") -> str:
    """Words in the colour of the page's text (`ink`), or in black on a box (`label`)."""
    colour = "#111111" if kind == "ink" else "#000000"
    font = f'class="{kind}" font-family="monospace" font-size="{size}" fill="{colour}"'
    return f'<text x="{x}" y="{y}" {font}>{escape(words)}</text>'
