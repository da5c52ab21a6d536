"""`meshpar chaos`."""

from __future__ import annotations

from typing import Annotated

import typer

from meshpar.cli.app import AsJson, ConfigFile, Devices, Overrides, app, echo, leaving, use_cache
from meshpar.errors import ConfigError

WORKER = "chaos-worker"
EVERY = 10
"""The number of parts into which checkpoints divide the run."""


@app.command()
def chaos(
    config: ConfigFile,
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the faults' order, steps and processes.")] = 0,
    faults: Annotated[
        str, typer.Option(metavar="KIND,...", help="The faults to inject; a kind can be repeated.")
    ] = "kill,stop,corrupt,full-disk,sigterm,slow,flip",
    processes: Annotated[int, typer.Option(min=2, help="Number of processes, which share the devices.")] = 2,
    devices: Devices = None,
    json: AsJson = False,
) -> None:
    """Trains CONFIG in several processes, undisturbed and under random faults, and compares the two runs.

    Both runs are written below the config's run_dir. The exit code is 1 if losses, parameters or batches differ, or if
    a process outlives a dead one by more than 15 s. SIGINT or SIGTERM ends it.
    """
    from meshpar.chaos import trial
    from meshpar.chaos.faults import FAULTS, plan
    from meshpar.experiment.config import load

    kinds = faults.split(",")
    unknown = sorted(set(kinds) - FAULTS.keys())
    if unknown:
        raise ConfigError(f"--faults {', '.join(unknown)}: there are {', '.join(FAULTS)}")
    run = load(config, overrides or [])
    total = devices or run.mesh.requested()
    if total is None or total % processes:
        raise ConfigError(f"--processes {processes} cannot share {total or 'a free number of'} devices: set --devices")
    if run.run_dir.exists() and any(run.run_dir.iterdir()):
        raise ConfigError(f"run_dir: {run.run_dir} is not empty; chaos needs a folder of its own")
    if run.checkpoints.mirror:  # both runs would be one there, and compared with itself
        raise ConfigError("checkpoints.mirror: the runs of chaos begin from nothing; set checkpoints.mirror=null")
    every = max(1, run.num_steps // EVERY)
    settings = [
        f"checkpoints={{every: {every}}}",
        f"eval_every={max(1, every // 2)}",
        f"check_replicas_every={every}",
        "log_every=1",
        "loggers=[]",
    ]
    command = [WORKER, str(config), *(overrides or []), *settings, f"--devices={total}"]
    setup = trial.Setup(run, command, processes, total, run.run_dir)
    planned = plan(kinds, run.num_steps, seed)
    with leaving():
        expected = trial.undisturbed(setup)
        result = trial.compare(expected, trial.disturbed(setup, planned, seed), len(planned))
    echo(result, json)
    raise typer.Exit(1 if result.differences else 0)


@app.command(WORKER, hidden=True)
def chaos_worker(config: ConfigFile, overrides: Overrides = None, devices: Devices = None) -> None:
    """A process of `meshpar chaos`."""
    from meshpar.experiment.config import load
    from meshpar.mesh.join import join

    run = load(config, overrides or [])
    join()
    run.mesh.simulate(devices)
    use_cache(False)
    from meshpar.chaos.worker import train

    with leaving():
        train(run)
