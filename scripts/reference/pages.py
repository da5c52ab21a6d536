"""The generated pages of the reference: every key of a config, every command, every public name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from reference.commands import commands_page
from reference.keys import divided, keys_page, sections
from reference.names import names_page

FOLDER = Path(__file__).parents[2] / "docs" / "reference"


def run_page() -> str:
    from meshpar import Run

    about = """# Keys of a config

This page lists every key of a config file of `meshpar train`, with an example for the command line.
[Configs](index.md#configs) says how files and command lines are read. The classes are those of Python:
`meshpar.AdamW(lr=1e-3)` is `optim: {kind: adamw, lr: 1e-3}`. A kind alone has the defaults of its keys: `optim: lion`.
A key whose default is `null` accepts null too. Required keys must be set, unless `extends` names a file that sets them.
Paths are relative to the working directory.
"""
    return keys_page(Run, about)


def federated_page() -> str:
    from meshpar import Run
    from meshpar.federated import Federated

    about = """# Keys of a federated config

This page lists every key of a config file of `meshpar federated`, which simulates
[federated learning](../guides/federated.md). Paths are relative to the working directory.
"""
    of_runs = divided(sections(Run))
    return keys_page(Federated, about, {one.model: one.link.replace("(#", "(config.md#") for one in of_runs})


PAGES: dict[str, Callable[[], str]] = {
    "config.md": cache(run_page),
    "federated.md": cache(federated_page),
    "commands.md": cache(commands_page),
    "api.md": cache(names_page),
}
"""Name of the page in `docs/reference` -> its text."""


def outdated(folder: Path = FOLDER) -> list[str]:
    """The pages of a folder that are missing, or differ from those that would be generated."""
    return [
        name for name, text in PAGES.items() if not (folder / name).is_file() or (folder / name).read_text() != text()
    ]
