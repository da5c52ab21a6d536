"""`meshpar train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshpar.cli.app import (
    AsJson,
    ConfigFile,
    Devices,
    NoCache,
    Overrides,
    app,
    check_file,
    check_folder,
    leaving,
    use_cache,
    writing,
)  # fmt: skip
from meshpar.errors import ConfigError

LOCAL = "127.0.0.1"


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    devices: Devices = None,
    json: AsJson = False,
    profile: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a trace of a few steps.")] = None,
    dump_hlo: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the compiled step's text.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Serve metrics for Prometheus.", show_default=False)
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="Address of the interface for --metrics-port.")] = LOCAL,
    no_cache: NoCache = False,
) -> None:
    """Trains the model of CONFIG, or resumes from the last checkpoint in its run directory.

    SIGINT or SIGTERM ends the run after the current step, with a checkpoint and exit code 75. A second signal ends it
    at once.
    """
    from meshpar.experiment import actions
    from meshpar.experiment.config import load
    from meshpar.mesh.join import join
    from meshpar.records.loggers import Prometheus

    loaded = load(config, overrides or [])
    if metrics_host != LOCAL and not metrics_port:
        raise ConfigError(f"--metrics-host {metrics_host}: needs --metrics-port, without which no metrics are served")
    if metrics_port:
        metrics = Prometheus(host=metrics_host, port=metrics_port)
        loaded = loaded.model_copy(update={"loggers": (*loaded.loggers, metrics)})
    if dump_hlo:
        check_file("--dump-hlo", dump_hlo)
    if profile:
        with writing("--profile", profile, "made"):
            profile.mkdir(parents=True, exist_ok=True)
        check_folder("--profile", profile, profile)
    join()
    loaded.mesh.simulate(devices)
    use_cache(no_cache)
    with leaving():
        actions.fit(loaded, json=json, profile=profile, dump_hlo=dump_hlo, signals=True)
