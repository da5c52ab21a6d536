"""Faults of a page on a screen, found by the browser that shows it and by comparison with the plain data."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from tests.program.chromium import Browser

# The background of an element is that of its nearest ancestor that has one; the contrast is defined as in WCAG 2.
LOOK = """(() => {
  const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.map(v => linear(v / 255)); return .2126 * r + .7152 * g + .0722 * b; };
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const ground = e => { const c = parse(getComputedStyle(e).backgroundColor);
    return c.length == 3 || c[3] > 0 ? c : ground(e.parentElement); };
  const faults = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || e.closest('svg') || e.closest('thead') && innerWidth < 700) continue;
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    const [a, b] = [light(parse(style.color).slice(0, 3)), light(ground(e).slice(0, 3))].sort((x, y) => y - x);
    if (!(box.width && box.height) || style.visibility != 'visible' || (a + .05) / (b + .05) < 4.5) faults.push(text);
  }
  return faults;
})()"""
# What a schedule has may be scrolled to inside it.
BEYOND = """[...document.body.querySelectorAll('*')].filter(e => !e.parentElement.closest('.schedule')).filter(e => {
  const box = e.getBoundingClientRect(); return box.width && (box.right > innerWidth + .5 || box.left < -.5);
}).map(e => e.outerHTML.slice(0, 80))"""
BOXES = "[...document.querySelectorAll('{}')].map(e => e.getBoundingClientRect()).map(b => [b.left, b.width])"
LABELS = """[...document.querySelectorAll('.block text')].filter(t => t.getBoundingClientRect().width).filter(t => {
  const inner = t.getBoundingClientRect(), outer = t.parentNode.querySelector('.bar').getBoundingClientRect();
  return inner.left < outer.left || inner.right > outer.right + .5;
}).map(t => t.textContent)"""
COVERED = """[...document.querySelectorAll('.line, tr')].filter(line => {
  const boxes = [...line.children].map(e => e.getBoundingClientRect()).filter(b => b.width);
  const shared = (a, b, from, to) => Math.min(a[to], b[to]) - Math.max(a[from], b[from]);
  const meet = (a, b) => shared(a, b, 'left', 'right') > .5 && shared(a, b, 'top', 'bottom') > .5;
  return boxes.some((a, i) => boxes.slice(i + 1).some(b => meet(a, b)));
}).map(line => line.textContent)"""


def faults(
    browser: Browser, html: str, plain: dict[str, Any], folder: Path, width: int, scheme: str = "light"
) -> set[str]:
    """The faults of the page of an inspection's plain data on one screen."""
    found = shown_faults(browser, html, folder, width, scheme)
    wrong = {
        "is out of scale": not _in_scale(browser, plain),
        "is out of place": not _in_place(browser, plain),
        "lacks a block": len(browser.ask(BOXES.format(".block"))) != len(plain["collectives"]),
    }
    return found | {name for name, is_wrong in wrong.items() if is_wrong}


def shown_faults(browser: Browser, html: str, folder: Path, width: int, scheme: str = "light") -> set[str]:
    """Shows a page, and finds the faults that any page may have."""
    (folder / "page.html").write_text(html, encoding="utf-8")
    browser.open(folder / "page.html", width, scheme)
    wrong = {
        "is wider than the screen": browser.ask(BEYOND) or browser.ask("document.documentElement.scrollWidth") > width,
        "has text that cannot be read": browser.ask(LOOK),
        "has labels that overlap": browser.ask(LABELS) or browser.ask(COVERED),
        "ran code": browser.ask("window.hit") == 1,
        "asked for something": browser.requests(),
        "complained": browser.console(),
    }
    return {name for name, found in wrong.items() if found}


def _in_scale(browser: Browser, plain: dict[str, Any]) -> bool:
    """Whether the widths of bars beside each other are proportional to their bytes."""
    sent = plain["sent_bytes_per_axis"]
    form = plain["traced_bytes_per_axis"]
    axes = dict.fromkeys([*sent, *form])
    pairs = [sent.get(a, 0) for a in axes] + [form.get(a, 0) for a in axes]
    bars = [width for name in (".sent", ".form") for _, width in browser.ask(BOXES.format(name))]
    blocks = [width for _, width in browser.ask(BOXES.format(".block .bar"))]
    memory = plain["memory"]
    held = [*memory["arguments"].values(), memory["outputs"], memory["temporaries"]]
    parts = [width for _, width in browser.ask(BOXES.format(".part"))]
    together = sum(parts) / browser.ask(BOXES.format(".stack .track"))[0][1]
    whole = max(sum(held), memory["total"], plain.get("chip_bytes") or 0)
    sizes_of_blocks = [width for _, width in _lanes(plain)]
    return (
        _proportional(bars, pairs)
        and _proportional(blocks, sizes_of_blocks)
        and abs(together - sum(held) / whole) < 1e-3
    )


def _in_place(browser: Browser, plain: dict[str, Any]) -> bool:
    """Whether every block starts where the blocks before it in the program end."""
    (left, width), *_ = browser.ask(BOXES.format(".lane .track"))
    lefts = [(at - left) / width for at, _ in browser.ask(BOXES.format(".block .bar"))]
    starts = _lanes(plain)
    whole = sum(size for _, size in starts)
    return all(abs(at - start / whole) < 1e-3 for at, (start, _) in zip(lefts, starts, strict=False))


def _lanes(plain: dict[str, Any]) -> list[tuple[float, float]]:
    """(start, size) in bytes of the collectives, lane after lane, as the page has them."""
    sizes = [collective["times"] * collective["sent_bytes"] for collective in plain["collectives"]]
    lanes = defaultdict(list)
    for start, size, collective in zip(accumulate(sizes, initial=0), sizes, plain["collectives"], strict=False):
        lanes[tuple(collective["axes"])].append((start, size))
    return [block for lane in lanes.values() for block in lane]


def _proportional(widths: list[float], sizes: list[float]) -> bool:
    scale = sum(widths) / sum(sizes)
    return len(widths) == len(sizes) and all(abs(w - scale * s) < 0.6 for w, s in zip(widths, sizes, strict=True))
