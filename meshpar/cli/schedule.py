"""`meshpar schedule`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshpar.cli.app import app, write
from meshpar.errors import ConfigError

SHORTEST, LONGEST = 1e-6, 1e6


def _drawable(time: float) -> float:
    if time and not SHORTEST <= time <= LONGEST:
        raise typer.BadParameter(f"{time} is neither 0 nor between {SHORTEST:g} and {LONGEST:g}")
    return time


@app.command()
def schedule(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="gpipe, 1f1b, interleaved, zb_h1, ... or a file of orders.")
    ],
    stages: Annotated[int, typer.Option(min=1, max=1024)] = 4,
    microbatches: Annotated[int, typer.Option(min=1, max=2**15)] = 8,
    chunks: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Of each stage, where the schedule takes a number.")
    ] = None,
    f: Annotated[
        float, typer.Option("--f", min=0, callback=_drawable, help="Time of a forward of a whole stage.")
    ] = 1.0,
    b: Annotated[
        float, typer.Option("--b", min=0, callback=_drawable, help="Of a backward with respect to the input.")
    ] = 1.0,
    w: Annotated[
        float, typer.Option("--w", min=0, callback=_drawable, help="Of a backward with respect to the weights.")
    ] = 1.0,
    transfer: Annotated[
        float, typer.Option(min=0, callback=_drawable, help="Of an activation to the next stage.")
    ] = 0.0,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it there.")] = None,
) -> None:
    """Draws a pipeline schedule: when each stage does which forward and backward, and how long it waits."""
    import shutil

    from meshpar.parallel.pipeline import gantt
    from meshpar.parallel.pipeline.named import named
    from meshpar.parallel.pipeline.simulate import Times, simulate

    if not f + b + w:
        raise ConfigError("schedule: --f, --b and --w are all 0, and nothing takes time")
    found = named(name, stages, microbatches, chunks)
    told = simulate(found, stages, Times(f, b, w, transfer))
    if svg:
        write("--svg", svg, gantt.svg(told, f"{name}: {stages} stages, {microbatches} microbatches"))
    typer.echo(gantt.text(told, shutil.get_terminal_size((120, 24)).columns))
    typer.echo(gantt.summary(told))
