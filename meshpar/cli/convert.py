"""`meshpar convert`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from meshpar.cli.app import Overrides, app
from meshpar.errors import ConfigError

LARGEST_FILE = 5 * 10**9
"""As in `interop.export`, whose import takes a second that other verbs do not need."""


@app.command()
def convert(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)],
    overrides: Overrides = None,
    from_hf: Annotated[Path | None, typer.Option(metavar="DIR", help="Read a model, and create RUN.")] = None,
    to_hf: Annotated[Path | None, typer.Option(metavar="DIR", help="Write RUN's last checkpoint.")] = None,
    largest_file: Annotated[int, typer.Option(metavar="BYTES", min=1, help="Largest file to write.")] = LARGEST_FILE,
) -> None:
    """Converts a Hugging Face model to a run, or a run to a Hugging Face model. Overwrites nothing.

    With --from-hf, RUN receives a config, to which KEY=VALUEs are applied, and a checkpoint from which `train` starts.
    With --to-hf, RUN may also be the config of a run.
    """
    if (from_hf is None) == (to_hf is None):
        raise ConfigError("convert needs either --from-hf DIR or --to-hf DIR")
    if to_hf is not None and overrides:
        raise ConfigError(f"{overrides[0]}: --to-hf takes no KEY=VALUE, because it writes the run as it was trained")
    if from_hf is not None and largest_file != LARGEST_FILE:
        raise ConfigError("--largest-file is for --to-hf: a run has no such files")
    from meshpar import convert

    if from_hf is not None:
        written = convert.from_hf(from_hf, run, overrides or [])
        named = "" if written.data.kind != "none" else " data.kind=jsonl data.path=FILE"
        if named and written.model.kind == "encoder":
            named = " data.kind=import data.target=MODULE:ROWS"
        typer.echo(
            f"{run}: {convert.RUN_CONFIG} and the checkpoint of step 0\n"
            f"to train it on your data: meshpar train {shlex.quote(f'{run}/{convert.RUN_CONFIG}')}{named}"
        )
    elif to_hf is not None:
        convert.to_hf(run, to_hf, largest_file)
        typer.echo(f"{to_hf}: written")
