"""`meshpar explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshpar.cli.app import AsJson, ConfigFile, Devices, app, echo, write
from meshpar.errors import ConfigError


@app.command()
def explain(
    config: ConfigFile,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[PATH] [KEY=VALUE]...", show_default=False)] = None,
    devices: Devices = None,
    json: AsJson = False,
    activations: Annotated[bool, typer.Option(help="Also list the activations that an imported model moves.")] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the arrays.")] = None,
) -> None:
    """Prints dims, rules, sharding, local shape and bytes per device of every parameter. Needs no devices.

    With PATH, a glob such as `blocks.*.kernel`, also draws how these arrays are placed on the mesh.
    """
    from meshpar.experiment.config import load

    paths = [argument for argument in arguments or [] if "=" not in argument]
    loaded = load(config, [argument for argument in arguments or [] if "=" in argument])
    if len(paths) > 1:
        raise ConfigError(f"explain takes one PATH, got {' and '.join(paths)}")
    from meshpar.experiment import actions

    explanation = actions.explain(loaded, paths[0] if paths else None, devices, activations)
    if svg:
        write("--svg", svg, explanation.svg())
    echo(explanation, json)
