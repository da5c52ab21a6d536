"""`meshpar data`: `show`."""

from __future__ import annotations

import json as json_format
import sys
from typing import Annotated

import typer

from meshpar.cli.app import AsJson, ConfigFile, Overrides, Verbs, app
from meshpar.errors import ConfigError

verbs = Verbs(no_args_is_help=True)
app.add_typer(verbs, name="data", help="Shows what a run trains on.")


@verbs.callback()
def _data() -> None:
    """Shows what a run trains on."""


@verbs.command()
def show(
    config: ConfigFile,
    overrides: Overrides = None,
    row: Annotated[int, typer.Option(metavar="N", help="The number of the row that the training reads.")] = 0,
    json: AsJson = False,
) -> None:
    """Prints a row of the training data as text. What is learned is in color, or between the brackets ⟦ and ⟧."""
    from meshpar.experiment.config import load
    from meshpar.train.data.shown import show as shown
    from meshpar.train.rows.config import RowData

    run = load(config, overrides or [])
    if isinstance(run.data, RowData):
        what = f"data.kind = {run.data.kind}: its rows are arrays, and this shows rows of tokens as text"
        raise ConfigError(f"{what}; call {run.data.label} in Python to see them")
    found = shown(run.data, run.seed, row)
    if json:
        typer.echo(json_format.dumps(found.as_json(), indent=2))
    elif sys.stdout.isatty():
        typer.echo(found.text(lambda text: typer.style(text, fg="green", bold=True)))
    else:
        typer.echo(str(found))
