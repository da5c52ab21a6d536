"""Loads the templates of HTML pages; each page is one file, without scripts, fonts or links to other files."""

from __future__ import annotations

from pathlib import Path

import jinja2

from meshpar.inspection.report.places import short_source, times_text
from meshpar.tree import human_bytes, human_flops

HERE = Path(__file__).parent


def environment(folder: Path = HERE) -> jinja2.Environment:
    """The templates of a folder, with the macros and the style that all pages share. All values are escaped."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, HERE]),
        autoescape=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    functions = (human_bytes, human_flops, short_source, times_text)
    found.filters |= {function.__name__: function for function in functions}
    return found
