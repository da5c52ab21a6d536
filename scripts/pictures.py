"""Draws the pictures of the docs that no command draws, each for light and for dark pages.

    python scripts/pictures.py    # draws; `make pictures` computes the table first

`layouts`: the table of `docs/guides/which-layout.md` as bars. `tree`: its questions and answers.
`releases`: the figures of `docs/benchmarks.json` as bars. `ring`: the all-reduce of `docs/learn/03-collectives.md`.
Also the schedules of pipelines in `docs/concepts/pipelines.md`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import animation
from meshpar import collectives
from meshpar.parallel.pipeline import gantt
from meshpar.parallel.pipeline.get_schedule import get_schedule
from meshpar.parallel.pipeline.simulate import OpTimes, simulate
from meshpar.tree import human_bytes, parse_bytes

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "guides" / "which-layout.md"
AXES = {
    "data": "#4c78a8", "replica": "#9ecae9", "fsdp": "#f58518", "tensor": "#54a24b", "context": "#b279a2",
    "pipe": "#e45756",
}  # fmt: skip
OTHER = "#9d9d9d"
HELD = "#8a8f98"
MODES = {
    # mode: (paper, text, faint, box)
    "light": ("#ffffff", "#1f2328", "#d0d7de", "#f6f8fa"),
    "dark": ("#0d1117", "#e6edf3", "#3d444d", "#161b22"),
}
# Pixels.
ROW = 25
TOP = 70
NAME, LOSS, SENT, HOLDS, WIDTH = 12, 190, 270, 590, 880
BAR = 210


class Row(NamedTuple):
    name: str
    loss: str
    total: str
    sent: list[tuple[str, float]]
    held: float


def number(size: str) -> float:
    return float(parse_bytes(size))


def table_of(page: str) -> str:
    """The table of layouts of a page, as text."""
    found = re.search(r"^\| layout \| loss .*?\|(?=\n\n)", page, re.MULTILINE | re.DOTALL)
    assert found
    return found[0]


def rows(page: str) -> list[Row]:
    """The table of layouts of a page."""
    found = []
    for line in re.findall(r"^\| .+ \| \d\.\d{4} \| .+ \| .+ \|$", page, re.MULTILINE):
        name, loss, sent, held = (cell.strip() for cell in line.strip("|").split("|"))
        total, _, by_axes = sent.partition(": ")
        parts = re.findall(r"([a-z][a-z, ]*) ([\d.]+ \w+)", by_axes)
        found.append(Row(name, loss, total, [(axes, number(num)) for axes, num in parts], number(held)))
    return found


def layouts(table: list[Row], mode: str) -> str:
    """Bars of the bytes that a device sends, by axes, and of the bytes that it holds."""
    _, ink, faint, _ = MODES[mode]
    height = TOP + ROW * len(table) + 34
    most_sent = max(sum(num for _, num in row.sent) for row in table)
    most_held = max(row.held for row in table)
    heads = {NAME: "layout", LOSS: "loss, step 3", SENT: "a device sends in a step", HOLDS: "a device holds at most"}
    drawn = [text(NAME, 24, "One model, thirteen layouts: the same loss", ink, 15, "bold")]
    drawn += [text(x, TOP - 14, words, ink, 12, "bold") for x, words in heads.items()]
    drawn.append(f'<path d="M{NAME} {TOP - 6}H{WIDTH - 12}" stroke="{faint}"/>')
    for i, row in enumerate(table):
        y = TOP + ROW * i
        drawn += [text(NAME, y + 16, row.name, ink), text(LOSS, y + 16, row.loss, ink)]
        drawn += bars(y, row, most_sent, most_held, ink)
    x = SENT
    for axis, colour in (AXES | {"several axes": OTHER}).items():
        drawn += [rect(x, height - 24, 11, 11, colour), text(x + 15, height - 14, axis, ink, 11)]
        x += 28 + 7 * len(axis)
    return document(WIDTH, height, drawn, mode)


def bars(y: int, row: Row, most_sent: float, most_held: float, ink: str) -> Iterator[str]:
    x = float(SENT)
    for axes, num in row.sent:
        width = BAR * num / most_sent
        yield rect(x, y + 4, width, 15, AXES.get(axes, OTHER))
        x += width
    yield text(x + 5, y + 16, row.total, ink, 11)
    yield rect(HOLDS, y + 4, BAR * row.held / most_held, 15, HELD)
    yield text(HOLDS + BAR * row.held / most_held + 5, y + 16, human_bytes(row.held), ink, 11)


QUESTIONS = {
    "Does a step fit, with all/activations saved?": "ZeRO-2, or data parallelism/rules=[zero2], rules=[replicated]",
    "... with one layer's/parameters gathered?": "ZeRO-3; in groups on slow links/rules=[fsdp], rules=[hsdp]",
    "Are a layer's matrices or/activations too large?": "and tensor parallelism in a host/rules=[fsdp,megatron_sp]",
    "Is one row too long/for a device?": "and context parallelism/rules=[fsdp,context]",
    "Do devices wait for gathers/across hosts?": "and a pipeline across hosts/rules=[pipeline,zero1,megatron_sp]",
}
"""Question -> the answer if it is yes, and its rules, in two lines each."""
LAST = "A model with experts adds the axis expert. Sites with a slow link between them add local updates."


def tree(mode: str) -> str:
    """Questions downwards; to the right, the answer to each yes."""
    _, ink, faint, box = MODES[mode]
    step, left, right, width = 74, 12, 330, 700
    drawn: list[str] = []
    for i, (question, answer) in enumerate(QUESTIONS.items()):
        y = 12 + step * i
        drawn += [frame(left, y, 236, 46, box, faint), frame(right, y, 340, 46, box, AXES["data"])]
        drawn += [text(left + 12, y + 19 + 16 * j, line, ink, 13) for j, line in enumerate(question.split("/"))]
        name, rules = answer.split("/")
        drawn.append(text(right + 12, y + 19, name, ink, 13, "bold"))
        drawn.append(text(right + 12, y + 36, rules, ink, 12, family="monospace"))
        drawn += [arrow(left + 236, y + 23, right, y + 23, ink), text(left + 262, y + 18, "yes", ink)]
        if i + 1 < len(QUESTIONS):
            drawn += [arrow(130, y + 46, 130, y + step, ink), text(140, y + 65, "no", ink)]
    height = 12 + step * len(QUESTIONS) + 22
    return document(width, height, [*drawn, text(left, height - 16, LAST, ink)], mode)


FIGURES = {
    "sent_bytes": "sends in a step", "flops": "FLOPs of a step", "temporary_bytes": "temporaries",
    "compile_s": "compiles, CPU s",
}  # fmt: skip
RELEASES = [AXES["replica"], AXES["data"]]
"""Colours of the last but one release and of the last."""


def releases(measured: dict[str, Any], mode: str) -> str:
    """Layout by layout, the figures of the last two releases, as parts of the largest of a figure."""
    _, ink, faint, _ = MODES[mode]
    versions = list(measured)[-2:]
    names = list(measured[versions[-1]]["layouts"])
    height, column = TOP + ROW * len(names) + 34, (WIDTH - LOSS) / len(FIGURES)
    drawn = [text(NAME, 24, "One device of each layout, in the last two releases", ink, 15, "bold")]
    drawn.append(f'<path d="M{NAME} {TOP - 6}H{WIDTH - 12}" stroke="{faint}"/>')
    drawn += [text(NAME, TOP + ROW * i + 16, name, ink) for i, name in enumerate(names)]
    for j, (figure, words) in enumerate(FIGURES.items()):
        x = LOSS + column * j
        drawn.append(text(x, TOP - 14, words, ink, 12, "bold"))
        most = max(row[figure] for name in versions for row in measured[name]["layouts"].values())
        for k, release in enumerate(versions):
            for i, name in enumerate(names):
                width = (column - 20) * measured[release]["layouts"][name][figure] / most
                drawn.append(rect(x, TOP + ROW * i + 4 + 8 * k, width, 7, RELEASES[k]))
    for k, release in enumerate(versions):
        drawn += [
            rect(LOSS + 80 * k, height - 24, 11, 11, RELEASES[k]),
            text(LOSS + 15 + 80 * k, height - 14, release, ink),
        ]
    return document(WIDTH, height, drawn, mode)


def schedule(name: str, stages: int = 4, microbatches: int = 8) -> str:
    """A pipeline's schedule, as `meshpar schedule NAME --svg` draws it."""
    timeline = simulate(get_schedule(name, stages, microbatches, None), stages, OpTimes(1.0, 1.0, 1.0, 0.0))
    return gantt.svg(timeline, f"{name}: {stages} stages, {microbatches} microbatches")


def ring(mode: str) -> str:
    """A ring all-reduce of four devices, animated."""
    drawn = animation.animated(collectives.plan("all_reduce", "ring", 4), MODES[mode][1])
    return document(animation.WIDTH, animation.HEIGHT, drawn, mode)


def text(
    x: float, y: float, words: str, ink: str, size: int = 12, weight: str = "normal", family: str = "sans-serif"
) -> str:
    style = f'font-family="{family}" font-size="{size}" font-weight="{weight}" fill="{ink}"'
    return f'<text x="{x:.0f}" y="{y}" {style}>{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def frame(x: float, y: float, width: float, height: float, fill: str, line: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="{line}"/>'


def arrow(x: float, y: float, to_x: float, to_y: float, ink: str) -> str:
    return f'<path d="M{x} {y}L{to_x} {to_y}" stroke="{ink}" marker-end="url(#end)"/>'


def document(width: float, height: float, drawn: list[str], mode: str) -> str:
    paper, ink, _, _ = MODES[mode]
    end = (
        '<marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{ink}"/></marker>'
    )
    box = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    body = "\n".join([f"<defs>{end}</defs>", frame(0, 0, width, height, paper, paper), *drawn])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n{body}\n</svg>\n'


def pictures() -> dict[Path, str]:
    """Path -> the picture."""
    table = rows(PAGE.read_text())
    folder = DOCS / "pictures"
    schedules = {DOCS / "concepts" / f"pipeline-{name}.svg": schedule(name) for name in ("1f1b", "zb_h1", "zbv")}
    measured = json.loads((DOCS / "benchmarks.json").read_text())
    drawn = schedules | {folder / f"layouts-{mode}.svg": layouts(table, mode) for mode in MODES}
    drawn |= {folder / f"ring-{mode}.svg": ring(mode) for mode in MODES}
    drawn |= {folder / f"releases-{mode}.svg": releases(measured, mode) for mode in MODES}
    return drawn | {folder / f"tree-{mode}.svg": tree(mode) for mode in MODES}


def draw() -> None:
    for path, picture in pictures().items():
        path.write_text(picture)


if __name__ == "__main__":
    draw()
