"""`meshpar federated`."""

from __future__ import annotations

from meshpar.cli.app import AsJson, ConfigFile, Devices, NoCache, Overrides, app, leaving, use_cache


@app.command()
def federated(
    config: ConfigFile,
    overrides: Overrides = None,
    devices: Devices = None,
    json: AsJson = False,
    no_cache: NoCache = False,
) -> None:
    """Trains a model on simulated clients by FedAvg, FedProx, FedAdam or SCAFFOLD, or resumes from the last checkpoint.

    The run directory receives the records, with results by client, checkpoints and the last parameters. `meshpar plot`
    draws the records. SIGINT or SIGTERM ends the run after the current round, with a checkpoint and exit code 75.
    """
    from meshpar.federated import run

    loaded = run.load(config, overrides or [])
    loaded.mesh.simulate(devices)
    use_cache(no_cache)
    with leaving():
        run.fit(loaded, json=json, signals=True)
