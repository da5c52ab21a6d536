"""`meshpar convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshpar.cli.app import Overrides, app
from meshpar.errors import ConfigError


@app.command()
def convert(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)],
    overrides: Overrides = None,
    from_hf: Annotated[Path | None, typer.Option(metavar="DIR", help="Read the model there, and make RUN.")] = None,
    to_hf: Annotated[Path | None, typer.Option(metavar="DIR", help="Write RUN's last checkpoint there.")] = None,
    largest_file: Annotated[int, typer.Option(metavar="BYTES", min=1, help="Of one file of --to-hf.")] = 5 * 10**9,
) -> None:
    """Makes a run of a folder with a Hugging Face model, or such a folder of a run. Nothing is overwritten.

    RUN gets a config, changed by KEY=VALUEs, and a checkpoint that `train` goes on from. For --to-hf it may also be
    the config of a run.
    """
    if (from_hf is None) == (to_hf is None):
        raise ConfigError("convert takes one of --from-hf DIR and --to-hf DIR")
    if to_hf is not None and overrides:
        raise ConfigError(f"{overrides[0]}: a run that was trained cannot be changed while it is written")
    from meshpar import convert

    if from_hf is not None:
        convert.from_hf(from_hf, run, overrides or [])
        typer.echo(
            f"{run}: {convert.RUN_CONFIG} and the checkpoint of step 0; meshpar train {run}/{convert.RUN_CONFIG}"
        )
    elif to_hf is not None:
        convert.to_hf(run, to_hf, largest_file)
        typer.echo(f"{to_hf}: written")
