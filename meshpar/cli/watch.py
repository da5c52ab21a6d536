"""`meshpar watch`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from meshpar.cli.app import app
from meshpar.errors import ConfigError


@app.command()
def watch(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.", show_default=False)],
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit, as without a terminal.")] = False,
) -> None:
    """Shows a run while it trains: loss, speed, processes, last checkpoint, and a process that lags behind.

    It only reads files of the run. Ctrl-C ends `watch` and not the run.
    """
    from rich.console import Console
    from rich.live import Live

    from meshpar.records.file import FILE
    from meshpar.train.watch import Watch

    if not (run_dir / FILE).is_file():
        raise ConfigError(f"{run_dir}: has no {FILE}: is it the run_dir of a run that has begun?")
    watched = Watch(run_dir)
    console = Console()
    if once or not sys.stdout.isatty():
        console.print(watched.look())
        return
    try:
        with Live(watched.look(), console=console, screen=False, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(watched.look(), refresh=True)
    except KeyboardInterrupt:
        pass
