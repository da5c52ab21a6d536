"""`meshpar federated`."""

from __future__ import annotations

from meshpar.cli.app import AsJson, ConfigFile, Devices, NoCache, Overrides, app, use_cache


@app.command()
def federated(
    config: ConfigFile,
    overrides: Overrides = None,
    devices: Devices = None,
    json: AsJson = False,
    no_cache: NoCache = False,
) -> None:
    """Trains a model on simulated clients by FedAvg, FedProx, FedAdam or SCAFFOLD.

    The run directory receives the records, with results by client, and the last parameters. `meshpar plot` draws the
    records.
    """
    from meshpar.federated import run

    loaded = run.load(config, overrides or [])
    loaded.mesh.simulate(devices)
    use_cache(no_cache)
    run.fit(loaded, json=json)
