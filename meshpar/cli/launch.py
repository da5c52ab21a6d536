"""`meshpar launch`."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated

import typer

from meshpar.cli.app import app, leave, writing
from meshpar.errors import ConfigError


@app.command(context_settings={"ignore_unknown_options": True})
def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- VERB [ARGUMENTS]...", show_default=False)],
    processes: Annotated[int, typer.Option(min=1, help="Number of processes.")],
    devices: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of CPU devices that each process simulates.", show_default="the mesh's, shared"
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of the first process, on loopback.", show_default="a free one"),
    ] = None,
    logs: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for the output of all processes but the first.", show_default="a new one"
        ),
    ] = None,
) -> None:
    """Runs another command in several processes on this machine, as hosts or GPUs of a cluster do.

    The first process prints to the terminal. When one fails, the others end too, and the end of its output is shown.
    """
    from meshpar.launch import workers

    if command[0] != "train":
        raise ConfigError(f"launch {command[0]}: only train runs in several processes")
    folder = logs or Path(mkdtemp(prefix="meshpar-"))
    with writing("--logs", folder, "made"):
        folder.mkdir(parents=True, exist_ok=True)
    typer.echo(f"meshpar: output of the other processes in {folder}", err=True)
    in_all = ["--devices", str(devices * processes)] if devices else []
    ended = workers.run([sys.executable, "-m", "meshpar", *command, *in_all], processes, folder, port)
    if ended.code:
        leave(ended.code, str(ended))
