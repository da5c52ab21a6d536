"""The command line: verbs over a config file, a file each. Bad input ends with a message and exit code 2.

A verb imports what it needs when it runs: a misspelt key is told before anything heavy is imported.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from meshpar import imports

# In being imported, a verb joins the app.
from meshpar.cli import (  # noqa: F401
    bench,
    checkpoint,
    convert,
    explain,
    generate,
    inspect,
    new,
    plot,
    prove,
    schedule,
    schema,
    train,
)
from meshpar.cli.app import app
from meshpar.errors import MeshparError


@app.callback()
def _meshpar(
    named: Annotated[
        list[Path] | None,
        typer.Option("--import", metavar="FILE", help="A Python file that CONFIG may import, wherever they lie."),
    ] = None,
) -> None:
    """Declare a mesh and a name for each dim; train on any layout of devices, with the same numbers."""
    for path in named or []:
        imports.name(path)


def main() -> None:
    """The entry point: 0, 1 for a failed run, 2 for bad input."""
    try:
        app()
    except MeshparError as error:
        typer.echo(f"meshpar: {error}", err=True)
        sys.exit(2)
