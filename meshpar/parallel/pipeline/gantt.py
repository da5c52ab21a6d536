"""A timeline drawn: a row a stage, time to the right."""

from __future__ import annotations

import math
from html import escape

from meshpar.parallel.pipeline.simulate import TimedOp, Timeline

COLOURS = {"F": "#4c78a8", "B": "#f58518", "W": "#54a24b"}
_UNIT, _ROW, _LEFT = 22, 26, 64


def text(timeline: Timeline, width: int = 120) -> str:
    """In letters: F, B and W where they begin, `-` while they last, `.` where a stage waits.

    Args:
      width: columns. Where there is no room for the microbatches, a letter lasts as its operation does, and every
        second chunk's is small; where there is none for that, time is drawn coarser, and the last line says how many
        operations can be seen.
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
    """What a stage does in each column. Each operation has one of its own, unless time is drawn too coarse for that."""
    columns: list[TimedOp | None] = [None] * math.ceil(makespan / step - 1e-9)
    free = 0
    for one in mine:
        first = _column(one.start, step) if is_coarse else max(free, _column(one.start, step))
        free = max(first + 1, _column(one.end, step))
        columns += [None] * (free - len(columns))
        columns[first:free] = [one] * (free - first)
    return columns


def _column(time: float, step: float) -> int:
    """The nearest. Of two, always the later: operations that last a step each never meet in one."""
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
    """Of a second chunk with an apostrophe, of a third with two."""
    return f"{one.op.kind}{one.op.microbatch}" + "'" * one.op.chunk


def summary(timeline: Timeline) -> str:
    """The numbers below the picture."""
    return (
        f"makespan {timeline.makespan:g}   busy {timeline.work:g}   bubble {timeline.bubble:.4f}"
        f"   idle in one step {timeline.idle:.4f}   activations held {timeline.peak:g}"
    )


def svg(timeline: Timeline, title: str) -> str:
    """As a self-contained SVG document; second chunks are lighter."""
    shortest = min((one.end - one.start for one in timeline.ran if one.end > one.start), default=1.0)
    unit = _UNIT / shortest
    width, height = round(_LEFT + unit * timeline.makespan + 8), _ROW * (timeline.num_stages + 2)
    rows = [_text(8, 18, title), *(_text(8, _y(i) + 16, f"stage {i}") for i in range(timeline.num_stages))]
    boxes = [_box(one, unit) for one in timeline.ran]
    foot = _text(8, _y(timeline.num_stages) + 16, summary(timeline))
    body = "\n".join([*rows, *boxes, foot])
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">\n{body}\n</svg>\n'


def _y(stage: int) -> int:
    return _ROW * (stage + 1)


def _box(one: TimedOp, unit: float) -> str:
    x, width = _LEFT + unit * one.start, unit * (one.end - one.start)
    opacity = 1 / (1 + 0.5 * one.op.chunk)
    rect = (
        f'<rect x="{x:.1f}" y="{_y(one.stage)}" width="{width:.1f}" height="{_ROW - 4}" fill="{COLOURS[one.op.kind]}"'
        f' fill-opacity="{opacity:.2f}" stroke="white"><title>{escape(str(one.op))}</title></rect>'
    )
    return rect + _text(round(x + 4), _y(one.stage) + 15, str(one.op.microbatch), 11)


def _text(x: int, y: int, words: str, size: int = 13) -> str:
    return f'<text x="{x}" y="{y}" font-family="monospace" font-size="{size}">{escape(words)}</text>'
