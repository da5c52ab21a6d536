"""The few pieces of HTML that the page is put together from. All of them escape the text that they are given."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def section(title: str, note: str, body: str) -> str:
    """A headed part of the page; nothing if it has no body, which is HTML."""
    said = f'<p class="soft small">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{said}{body}</section>" if body else ""


def row(name: str, value: str, more: str, drawn: str) -> str:
    """A name to the left, its value to the right and what else is said of it; below them, what is drawn."""
    beside = f'{escape(value)} <span class="soft">{escape(more)}</span>'
    line = f'<div class="line"><span class="mono">{escape(name)}</span><span class="number">{beside}</span></div>'
    return f'<div class="row">{line}{drawn}</div>'


def table(rows: Iterable[str], name: str = "", head: str = "") -> str:
    """A table of rows of cells; nothing if there are none."""
    body = "".join(f"<tr>{cells}</tr>" for cells in rows)
    above = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<table class="{name}">{above}<tbody>{body}</tbody></table>' if body else ""


def heads(**columns: str) -> str:
    """The heads of columns: each one's words, and its kind of cell."""
    return "".join(f'<th class="{kind}">{escape(words)}</th>' for words, kind in columns.items())


def word(text: str, colour: str = "") -> str:
    """A cell that is not broken over lines; with a colour, a swatch stands before it."""
    return f'<td class="word">{swatch(colour) if colour else ""}{escape(text)}</td>'


def number(text: str) -> str:
    """A cell whose digits stand below those of the cells above it."""
    return f'<td class="number">{escape(text)}</td>'


def code(text: str, kind: str, title: str = "") -> str:
    """A cell that holds a name or a place in the code."""
    more = f' title="{escape(title)}"' if title else ""
    shown = f"<code{more}>{escape(text)}</code>" if text else ""
    return f'<td class="{kind}">{shown}</td>'


def swatch(colour: str) -> str:
    """A square in one of the style's colours."""
    return f'<span class="swatch" style="background: var(--{colour})"></span>'
