"""`meshpar schedule`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from meshpar.cli.app import app, write
from meshpar.errors import ConfigError

SHORTEST = 1e-6
LONGEST = 1e6


def _drawable(time: float) -> float:
    if time and not SHORTEST <= time <= LONGEST:
        raise typer.BadParameter(f"{time} must be 0, or between {SHORTEST:g} and {LONGEST:g}")
    return time


def _time(description: str) -> Any:
    return typer.Option(min=0, callback=_drawable, help=description)


@app.command()
def schedule(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="gpipe, 1f1b, interleaved, zb_h1, ... or a schedule file.")
    ],
    stages: Annotated[int, typer.Option(min=1, max=1024, help="Number of stages.")] = 4,
    microbatches: Annotated[int, typer.Option(min=1, max=2**15, help="Number of microbatches.")] = 8,
    chunks: Annotated[int | None, typer.Option(min=1, max=1024, help="Chunks per stage, if variable.")] = None,
    f: Annotated[float, _time("Time of a stage's forward.")] = 1.0,
    b: Annotated[float, _time("Time of a stage's backward with respect to its input.")] = 1.0,
    w: Annotated[float, _time("Time of a stage's backward with respect to its weights.")] = 1.0,
    transfer: Annotated[float, _time("Time to send an activation to the next stage.")] = 0.0,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the schedule.")] = None,
) -> None:
    """Draws a pipeline schedule: when each stage computes which forward and backward, and how long it waits."""
    import shutil

    from meshpar.parallel.pipeline import gantt
    from meshpar.parallel.pipeline.get_schedule import get_schedule
    from meshpar.parallel.pipeline.simulate import OpTimes, simulate

    if not f + b + w:
        raise ConfigError("schedule: --f, --b and --w are all 0; at least one operation must take time")
    found = get_schedule(name, stages, microbatches, chunks)
    simulated = simulate(found, stages, OpTimes(f, b, w, transfer))
    if svg:
        write("--svg", svg, gantt.svg(simulated, f"{name}: {stages} stages, {microbatches} microbatches"))
    typer.echo(gantt.text(simulated, shutil.get_terminal_size((120, 24)).columns))
    typer.echo(gantt.summary(simulated))
