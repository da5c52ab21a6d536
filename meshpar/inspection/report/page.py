"""An inspection as a page for a browser: one file, without scripts, fonts or anything else from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from meshpar.inspection.report import charts
from meshpar.inspection.report.markup import code, heads, number, section, table, word
from meshpar.inspection.report.places import Place, places, short_source
from meshpar.inspection.report.plain import PlainFinding, PlainHeld, PlainInspection, plain
from meshpar.inspection.report.style import STYLE
from meshpar.mesh.layout import describe_sizes
from meshpar.tree import human_bytes, human_flops

# Whatever a name may hold, a browser that reads this runs no script and asks nobody for anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# Laid over what runs only in a branch. A style can only name it; it has to stand in the page.
_HATCH = (
    '<svg width="0" height="0" style="position: absolute; width: 0"><defs>'
    '<pattern id="hatch" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M0 0V8"/></pattern></defs></svg>'
)


def page(told: Mapping[str, Any]) -> str:
    """The page of an inspection, or of a judgement, from its plain data.

    Args:
      told: what `as_json()` gives, or what was read from a file of `meshpar inspect --json`.

    Returns:
      A whole HTML document. Names of the user's are escaped.
    """
    it = plain(told)
    sections = [
        _header(it),
        section("Findings", "", "".join(map(_finding, it.findings))),
        charts.sent(it),
        charts.order(it.collectives),
        charts.held(it.memory, it.chip_bytes),
        _places(places(it.collectives)),
        _largest("Largest arguments", [one for one in it.largest if one.is_argument]),
        _largest("Largest temporaries", [one for one in it.largest if not one.is_argument]),
        _opaque(it.opaque),
    ]
    return _document("\n".join(filter(None, sections)))


def _document(body: str) -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>A device, in one step</title>
<style>{STYLE}</style>
</head>
<body>
{_HATCH}
<main>
{body}
</main>
</body>
</html>
"""


def _header(it: PlainInspection) -> str:
    mesh = f"mesh: {describe_sizes(it.mesh)}" if it.mesh else "no mesh was given"
    seconds = it.products_s_estimate
    at_least = "" if seconds is None else f", {1e3 * seconds:.3g} ms at the chip's peak"
    tiles = [
        _tile("sends", human_bytes(it.sent_bytes), f"{it.sent_bytes:,} bytes"),
        _tile("matrix products", human_flops(it.flops), f"{it.flops:,} FLOPs{at_least}"),
        _tile("holds", human_bytes(it.memory.total), "at its peak" if it.memory.peak else "at most"),
    ]
    heading = f'<h1>A device, in one step</h1><p class="soft">{escape(mesh)}</p>'
    return f'<header>{heading}{_verdict(it)}<dl class="tiles">{"".join(tiles)}</dl></header>'


def _verdict(it: PlainInspection) -> str:
    if it.target is None or it.chip_bytes is None:
        return ""
    words, mark = ("fits", "fits") if it.fits else ("does not fit", "lacks")
    share = f"{human_bytes(it.memory.total)} of {human_bytes(it.chip_bytes)} ({it.memory.total / it.chip_bytes:.1%})"
    said = f"{it.target}: {words}. A device holds {share}. Compiled for it, not run."
    return f'<p class="verdict {mark}">{escape(said)}</p>'


def _tile(name: str, value: str, more: str) -> str:
    return f'<div class="tile"><dt>{name}</dt><dd>{value}</dd><dd class="soft">{escape(more)}</dd></div>'


def _finding(one: PlainFinding) -> str:
    cost = "" if one.bytes is None else f' <span class="soft">{human_bytes(one.bytes)}</span>'
    lines = [f"where: {short_source(one.where)}"] * bool(one.where) + [f"fix: {one.fix}"] * bool(one.fix)
    more = "".join(f'<br><span class="soft small">{escape(line)}</span>' for line in lines)
    return f'<p class="finding"><strong>{escape(one.kind)}</strong>{cost}<br>{escape(one.what)}{more}</p>'


def _places(found: Iterable[Place]) -> str:
    head = heads(kind="word", over="word", times="number", bytes="number", what="what", where="where")
    rows = [
        word(one.kind + " in a branch" * one.in_branch)
        + word(one.axes)
        + number(f"{one.times}x")
        + number(human_bytes(one.sent_bytes))
        + code(one.what, "what", title=", ".join(one.names))
        + code(short_source(one.source), "where", title=one.source)
        for one in found
    ]
    note = "A row is one place in the code, and sums up all its collectives."
    return section("Collectives by place", note, table(rows, head=head))


def _largest(title: str, held: Iterable[PlainHeld]) -> str:
    rows = [
        number(human_bytes(one.num_bytes))
        + code(one.array, "word")
        + code(one.name, "what")
        + code(short_source(one.source), "where", title=one.source)
        for one in held
    ]
    return section(title, "", table(rows))


def _opaque(targets: Iterable[str]) -> str:
    note = "Nobody sees their insides: what they send and compute is not counted."
    return section("Custom calls", note, table(code(target, "what") for target in targets))
