"""`meshpar schema`."""

from __future__ import annotations

import json

import typer

from meshpar.cli.app import app


@app.command()
def schema() -> None:
    """Prints the JSON schema of a config file, for editors."""
    from meshpar import config
    from meshpar.experiment.config import Run

    typer.echo(json.dumps(config.schema(Run), indent=2))
