"""`meshpar schema`."""

from __future__ import annotations

import json

import typer

from meshpar.cli.app import app


@app.command()
def schema() -> None:
    """Prints the JSON schema of a config file, for editors."""
    from meshpar import config, run

    typer.echo(json.dumps(config.schema(run.Run), indent=2))
