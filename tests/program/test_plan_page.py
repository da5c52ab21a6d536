"""The page of a plan in a real browser: its points lie where times and bytes say, and each kind of fault is found."""

from __future__ import annotations

import math
import re
import shlex
from html import unescape

import pytest

import meshpar
from meshpar import Run
from meshpar.config import load
from meshpar.planning.alternatives import shown
from meshpar.planning.page import _Scale, page
from meshpar.planning.plan import loses_by
from tests.docs.page import ROOT
from tests.program.chromium import chromium
from tests.program.look import shown_faults
from tests.unit.test_planning import RUN

DOCS = ROOT / "docs"
POINTS = """[...document.querySelectorAll('.point')].map(e => [
  e.querySelector('title').textContent, e.getBoundingClientRect().left, e.getBoundingClientRect().top, e.classList.value
])"""
HELD = """[...document.querySelectorAll('.held')].map(svg => {
  const box = svg.getBoundingClientRect();
  const right = Math.max(...[...svg.querySelectorAll('rect')].map(e => e.getBoundingClientRect().right));
  return [right - box.left, svg.querySelector('.limit').getBoundingClientRect().left - box.left];
})"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium") / "profile") as opened:
        yield opened


@pytest.fixture(scope="module")
def planned():
    fix = ["mesh.pipe=2", "model.remat=none", "mesh.context=1", "parallel.pipeline.kind=1f1b"]
    found = meshpar.plan(RUN, "h100:1x4", fix=fix)
    assert len(found.ranked) > 2, "two points are the scale of the others"
    return found


def faults(browser, html, planned, folder, width=1280, scheme="light"):
    """The faults that any page may have, points out of place, and a best layout that hovering does not name."""
    found = shown_faults(browser, html, folder, width, scheme)
    points = {title.splitlines()[0]: rest for title, *rest in browser.ask(POINTS)}
    traced = [(points.get(str(one.layout)), one.estimate) for one in planned.ranked]
    if any(point is None for point, _ in traced):
        return found | {"lacks a point"}
    for axis, value in ((0, lambda e: e.total_s), (1, lambda e: e.total_bytes)):
        (first, low), (last, high) = (
            (point[axis], math.log(value(estimate)))
            for point, estimate in (traced[0], max(traced, key=lambda one: abs(value(one[1]) - value(traced[0][1]))))
        )
        for point, estimate in traced:
            at = first + (last - first) * (math.log(value(estimate)) - low) / (high - low)
            if abs(point[axis] - at) > 2:
                found.add("has a point out of place")
    held = browser.ask(HELD)
    limit = {round(line / planned.at_most, 6) for _, line in held}
    sizes = [one.estimate.total_bytes for one in planned.ranked]
    if any(abs(width / line - size / planned.at_most) > 0.01 for (width, line), size in zip(held, sizes, strict=False)):
        found.add("has a bar of another length")
    if len(limit) > 1:
        found.add("has another limit")
    is_marked = points[str(planned.ranked[0].layout)][2] == "point best"
    is_drawn = bool(browser.ask("document.querySelectorAll('.schedule svg rect').length"))
    return (
        found | ({"marks another layout"} if not is_marked else set()) | (set() if is_drawn else {"lacks a schedule"})
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (400, "light")])
def test_a_plan_is_drawn_to_scale_and_fits_the_screen(browser, planned, tmp_path, width, scheme):
    html = page(planned, f"meshpar plan {'long' * 40}.yaml - meshpar 0").replace("<details>", "<details open>")
    assert faults(browser, html, planned, tmp_path, width, scheme) == set()


BROKEN = {
    "a point's place": (r'(class="point best" cx=)"[^"]*"', r'\1"50%"', "has a point out of place"),
    "what is held": (r'(<svg class="held".*?width=)"[^"]*"', r'\1"77%"', "has a bar of another length"),
    "the mark": ("point best", "point traced", "marks another layout"),
    "a missing point": (r'<circle class="point best".*?</circle>', "", "lacks a point"),
    "the schedule": (r'(<div class="schedule">).*?</div>', r"\1</div>", "lacks a schedule"),
    "a wide table": ("<header", '<header style="min-width: 1400px"', "is wider than the screen"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_control_a_broken_page_is_seen(browser, planned, tmp_path, broken):
    old, new, fault = BROKEN[broken]
    changed = re.sub(old, new, page(planned), flags=re.DOTALL)
    assert changed != page(planned)
    assert fault in faults(browser, changed, planned, tmp_path)


PAPER_AND_WORDS = """(() => {
  const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = e => { const [r, g, b] = getComputedStyle(e).fill.match(/[\\d.]+/g).map(v => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b; };
  const contrast = t => { const box = t.getBoundingClientRect();
    const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
    const under = document.elementsFromPoint(x, y).find(e => e.tagName == 'rect');
    const [a, b] = [light(t), light(under)].sort((x, y) => y - x);
    return (a + .05) / (b + .05); };
  return [light(document.querySelector('rect')), Math.min(...[...document.querySelectorAll('text')].map(contrast))];
})()"""
DRAWN = [path for path in sorted(DOCS.rglob("*.svg")) if "learn" not in path.parts]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_drawings_of_the_docs_suit_pages_of_both_schemes(browser, scheme):
    """Those of a schedule follow the page; of the others there is one for each scheme."""
    other = {"light": "-dark", "dark": "-light"}[scheme]
    shown = [path for path in DRAWN if not path.stem.endswith(other)]
    assert len(shown) == 7
    for path in shown:
        browser.open(path, 1280, scheme)
        paper, least = browser.ask(PAPER_AND_WORDS)
        assert (paper > 0.9 if scheme == "light" else paper < 0.05) and least >= 4.5, (path.name, paper, least)


def test_the_commands_of_a_plan_train_its_layouts(planned):
    """Each word of a command is taken as the shell and a config take it."""
    html = page(planned, command="meshpar train configs/quickstart.yaml num_steps=7")
    commands = [unescape(one) for one in re.findall(r'<p class="mono small">\d+\. (meshpar train .*)</p>', html)]
    assert len(commands) == len(planned.ranked)
    for command, one in zip(commands, planned.ranked, strict=True):
        _, _, config, *changes = shlex.split(command)
        run = load(Run, ROOT / config, changes)
        assert run.num_steps == 7
        assert {axis: size for axis, size in run.mesh.sizes.items() if size > 1} == one.layout.mesh
        assert (run.parallel.pipeline.kind, run.parallel.pipeline.num_microbatches) == (
            "1f1b",
            one.layout.num_microbatches,
        )


def ticks(html: str) -> list[str]:
    return re.findall(r'<text x="[^"]*" y="[^"]*"[^>]*>([^<]*)</text>', html.partition("</g>")[0])


def test_the_ticks_of_a_plan_are_round_and_in_place(planned):
    times, sizes = (
        [text.split() for text in ticks(page(planned)) if text.split()[1] in units]
        for units in (("ms", "s"), ("B", "KiB", "MiB", "GiB"))
    )
    for found in (times, sizes):
        assert 2 <= len(found) <= 12
        assert all(len(number.replace(".", "").strip("0")) <= 2 for number, _ in found), found


@pytest.mark.parametrize(
    ("least", "most", "unit", "expected"),
    [
        (40.1, 46.24, 1, [41, 42, 43, 44, 45, 46]),
        (3, 60, 1, [5, 10, 20, 50]),
        (0.0013, 0.9, 1, [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]),
        (10 * 2**20, 12 * 2**20, 2**20, [i * 2**19 for i in range(20, 25)]),
        (5, 5, 1, [5]),
    ],
)
def test_ticks_are_round_in_their_unit(least, most, unit, expected):
    assert _Scale(least, most, 0, 1).ticks(unit) == pytest.approx(expected)


def test_a_page_tells_its_origin_and_its_config(planned):
    html = page(planned, "meshpar plan <a.yaml> - meshpar 0")
    assert "meshpar plan &lt;a.yaml&gt; - meshpar 0" in html
    assert "parallel:" in html.partition("<details>")[2]
    assert "<footer" not in page(planned)


def test_a_page_says_why_layouts_lose_what_would_help_and_what_it_costs(planned):
    html = unescape(page(planned))
    first, second, *_ = planned.ranked
    assert f"{second.estimate.total_s / first.estimate.total_s - 1:+.1%}, by {loses_by(second, first)}" in html
    for text in [*planned.helps, *planned.costs, *(str(one.figure) for one in planned.alternatives)]:
        assert text in html
    for figure in planned.machine.figures:
        assert f"{shown(figure.value)} {figure.name}" in html
