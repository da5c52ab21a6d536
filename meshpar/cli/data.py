"""`meshpar data`: `show` and `build`."""

from __future__ import annotations

import json as json_format
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from meshpar.cli.app import AsJson, ConfigFile, Overrides, Verbs, app, echo
from meshpar.errors import ConfigError

verbs = Verbs(no_args_is_help=True)
app.add_typer(verbs, name="data", help="Shows what a run trains on, and encodes it once.")


@verbs.callback()
def _data() -> None:
    """Shows what a run trains on, and encodes it once."""


@verbs.command()
def show(
    config: ConfigFile,
    overrides: Overrides = None,
    row: Annotated[int, typer.Option(metavar="N", help="The number of the row that the training reads.")] = 0,
    json: AsJson = False,
) -> None:
    """Prints a row of the training data as text. What is learned is in color, or between the brackets ⟦ and ⟧."""
    from meshpar.data.rows.config import RowData
    from meshpar.data.shown import show as shown
    from meshpar.experiment.config import load

    run = load(config, overrides or [])
    if isinstance(run.data, RowData):
        what = f"data.kind = {run.data.kind}: its rows are arrays, and this shows rows of tokens as text"
        raise ConfigError(f"{what}; call {run.data.label} in Python to see them")
    found = shown(run.data, run.seed, row)
    if json:
        typer.echo(json_format.dumps(found.as_json(), indent=2))
    elif sys.stdout.isatty():
        typer.echo(found.text(lambda text: typer.style(text, fg="green", bold=True)))
    else:
        typer.echo(str(found))


@verbs.command()
def build(
    config: ConfigFile,
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder to write.", show_default=False)],
    overrides: Overrides = None,
    processes: Annotated[int, typer.Option(min=1, max=1024, help="Number of processes that encode.")] = 1,
    shard_bytes: Annotated[
        int, typer.Option(metavar="BYTES", min=1, help="Bytes of the files that become one shard, about.")
    ] = 2**28,
    part: Annotated[str, typer.Option(metavar="I/N", help="Encode each N-th shard, from the I-th on.")] = "1/1",
    json: AsJson = False,
) -> None:
    """Encodes the data of a config once, in shards, for `data: {kind: shards, path: FOLDER}`.

    A build that was stopped goes on with the same command: finished shards are not encoded again. Several hosts that
    see the same folder share a build with --part 1/2 and --part 2/2.
    """
    from meshpar.data.corpus import TextCorpus
    from meshpar.data.shards.build import build as encode
    from meshpar.experiment.config import load
    from meshpar.progress import say

    run = load(config, overrides or [])
    if not isinstance(run.data, TextCorpus):
        what = f"data.kind = {run.data.kind}: only text is encoded in shards"
        fix = "build each part alone, and mix the folders" if run.data.kind == "mixture" else "train on it as it is"
        raise ConfigError(f"{what}; {fix}")
    echo(encode(run.data, output, processes, shard_bytes, _part(part), say), json)


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    index, num = map(int, match.groups()) if match else (0, 0)
    if not 1 <= index <= num:
        raise ConfigError(f"--part {text}: is no part; for the first of two parts: --part 1/2")
    return index, num
