"""`meshpar explain`."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from meshpar.cli.app import AsJson, ConfigFile, Devices, app, write
from meshpar.errors import ConfigError


@app.command()
def explain(
    config: ConfigFile,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[PATH] [KEY=VALUE]...", show_default=False)] = None,
    devices: Devices = None,
    json: AsJson = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the arrays there.")] = None,
) -> None:
    """Says for every parameter: dims, rules, spec, local shape, bytes a device. Needs no devices.

    With PATH (a glob such as `blocks.*.kernel`) also draws how those arrays lie on the mesh.
    """
    from meshpar.experiment.config import load

    paths = [a for a in arguments or [] if "=" not in a]
    loaded = load(config, [a for a in arguments or [] if "=" in a])
    if len(paths) > 1:
        raise ConfigError(f"explain takes one PATH, got {' and '.join(paths)}")
    from meshpar.experiment import actions

    told = actions.explain(loaded, paths[0] if paths else None, devices)
    if svg:
        write("--svg", svg, told.svg())
    typer.echo(json_format.dumps(told.as_json(), indent=2) if json else str(told))
