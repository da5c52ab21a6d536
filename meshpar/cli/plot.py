"""`meshpar plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshpar.cli.app import app


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="The picture.", show_default="curves.png in the first RUN"),
    ] = None,
) -> None:
    """Plots loss and learning rate of one run, or of several in one plot, from their records.

    A run with experts gets a second picture, FILE-experts.png: the load of each expert over the steps. So does a
    federated run, FILE-clients.png: the accuracy of each client.
    """
    from meshpar.records.curves import draw

    out = out or runs[0] / "curves.png"
    for picture in draw(runs, out):
        typer.echo(picture)
