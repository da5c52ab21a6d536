"""`meshpar sweep`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from meshpar.cli.app import AsJson, ConfigFile, Devices, Overrides, app, echo, leaving


@app.command()
def sweep(
    config: ConfigFile,
    overrides: Overrides = None,
    parallel: Annotated[int, typer.Option(min=1, max=64, help="Number of runs at a time.")] = 1,
    metric: Annotated[str, typer.Option(help="Metric of the last evaluation, by which runs are compared.")] = "loss",
    best: Annotated[
        Literal["lowest", "highest"] | None,
        typer.Option(metavar="WHICH", help="The better value: lowest or highest.", show_default="by the metric"),
    ] = None,
    devices: Devices = None,
    json: AsJson = False,
) -> None:
    """Trains CONFIG once for each combination of values: KEY=[VALUE,...] lists values, KEY=VALUE is for all runs.

    Each run has a folder below the config's run_dir, which receives sweep.json and sweep.png too. Runs that have ended
    are not trained again. The exit code is 1 if a run failed. SIGINT or SIGTERM stops the runs, which save; the same
    command goes on with them.
    """
    from meshpar.errors import ConfigError
    from meshpar.mesh.join import place
    from meshpar.sweep.sweep import sweep as train_all

    if place() is not None:
        raise ConfigError("sweep starts processes of its own: run it without a launcher")
    with leaving():
        swept = train_all(config, overrides or [], parallel, metric, best, devices)
    echo(swept, json)
    raise typer.Exit(1 if any(outcome.why for outcome in swept.outcomes) else 0)
