"""`meshpar verify`."""

from __future__ import annotations

import typer

from meshpar.cli.app import AsJson, ConfigFile, NoCache, Overrides, app, echo, use_cache
from meshpar.errors import ConfigError


@app.command()
def verify(config: ConfigFile, overrides: Overrides = None, json: AsJson = False, no_cache: NoCache = False) -> None:
    """Checks that a small version of CONFIG computes the same on its mesh as on one device; names the axis at fault."""
    from meshpar.experiment.config import load
    from meshpar.mesh import process
    from meshpar.mesh.join import join
    from meshpar.verification import verify as proof
    from meshpar.verification.shrink import shrink

    loaded = load(config, overrides or [])
    mine = join()
    each = shrink(loaded).mesh.requested() or 1
    process.simulate(each * (mine.num_processes if mine else 1))
    use_cache(no_cache)
    result = proof.verify(loaded)
    echo(result, json)
    raise typer.Exit(0 if result.is_equal else 1)


@app.command("prove", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def prove() -> None:
    """The name of `verify` in older versions."""
    raise ConfigError("meshpar prove is now meshpar verify")
