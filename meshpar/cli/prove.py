"""`meshpar prove`."""

from __future__ import annotations

import typer

from meshpar.cli.app import AsJson, ConfigFile, Overrides, app, echo
from meshpar.progress import busy


@app.command()
def prove(config: ConfigFile, overrides: Overrides = None, json: AsJson = False) -> None:
    """Checks that a small version of CONFIG computes on its mesh what one device computes; otherwise names the axis."""
    from meshpar.experiment.config import load
    from meshpar.mesh import process
    from meshpar.proof import prove as proof
    from meshpar.proof.shrink import shrink

    loaded = load(config, overrides or [])
    process.simulate(shrink(loaded).mesh.requested() or 1)
    with busy("training on the mesh, on one device, and on one axis at a time", quiet=True):
        result = proof.prove(loaded)
    echo(result, json)
    raise typer.Exit(0 if result.is_equal else 1)
