"""`meshpar plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshpar.cli.app import AsJson, ConfigFile, Overrides, app, check_file, echo, write
from meshpar.progress import busy


@app.command()
def plan(
    config: ConfigFile,
    target: Annotated[str, typer.Option(metavar="MACHINE", help="Plan for v5e:4x4, v5p:4x4x4, h100:4x8, ...")],
    overrides: Overrides = None,
    fix: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A part of the layout that is given: mesh.tensor=8.")
    ] = None,
    at_most: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes that a device may hold, as in 60GiB.", show_default="94 %")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Write the config of the fastest layout.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Finds the layout of CONFIG on a machine that is fastest and fits, and says why the others lose.

    Considered are the sizes of all axes, ZeRO's stages, schedules of pipelines, microbatches and remat. The estimates
    are made from traced steps: nothing is compiled or run, and no devices are needed.
    """
    from meshpar.experiment.config import load
    from meshpar.planning.plan import plan as find

    if out:
        check_file("--write", out)
    loaded = load(config, overrides or [])
    with busy("tracing layouts", quiet=True):
        found = find(loaded, target, fix=fix or (), at_most=at_most)
    if out:
        write("--write", out, found.yaml())
    echo(found, json)
