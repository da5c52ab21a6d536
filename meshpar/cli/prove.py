"""`meshpar prove`."""

from __future__ import annotations

import json as json_format

import typer

from meshpar.cli.app import AsJson, ConfigFile, Overrides, app
from meshpar.progress import busy


@app.command()
def prove(config: ConfigFile, overrides: Overrides = None, json: AsJson = False) -> None:
    """Proves that CONFIG, made small, computes on its mesh what it does on one device; or says which axis is guilty."""
    from meshpar.experiment.config import load
    from meshpar.mesh import process
    from meshpar.proof import prove as proof
    from meshpar.proof.shrink import shrink

    loaded = load(config, overrides or [])
    process.simulate(shrink(loaded).mesh.requested() or 1)
    with busy("training on the mesh, on one device, and on one axis at a time", quiet=True):
        told = proof.prove(loaded)
    typer.echo(json_format.dumps(told.as_json(), indent=2) if json else str(told))
    raise typer.Exit(0 if told.is_equal else 1)
