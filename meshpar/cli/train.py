"""`meshpar train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshpar.cli.app import AsJson, ConfigFile, Devices, Overrides, app


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    devices: Devices = None,
    json: AsJson = False,
    profile: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a trace of a few steps there.")] = None,
    dump_hlo: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the compiled step's text there.")] = None,
) -> None:
    """Trains the model of CONFIG, or goes on from the last checkpoint in its run directory."""
    from meshpar import flow, run

    loaded = run.load(config, overrides or [])
    run.simulate(loaded, devices)
    flow.fit(loaded, json=json, profile=profile, dump_hlo=dump_hlo)
