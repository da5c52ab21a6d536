"""`meshpar compress`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from meshpar.cli.app import AsJson, app, echo
from meshpar.errors import ConfigError


@app.command()
def compress(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or the config of a run.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The run directory to write.")],
    weights: Annotated[
        Literal["int8", "int4", "nf4"] | None,
        typer.Option(metavar="KIND", help="Store kernels as codes: int8, int4 or nf4.", show_default="floats"),
    ] = None,
    group: Annotated[int, typer.Option(min=1, help="Inputs that share a scale.")] = 64,
    low_rank_error: Annotated[
        float | None,
        typer.Option(metavar="E", help="Store kernels as two factors, with this relative error.", show_default="whole"),
    ] = None,
    json: AsJson = False,
) -> None:
    """Writes the last checkpoint of a run as a run that stores its projections in fewer bytes. Overwrites nothing."""
    if weights is None and low_rank_error is None:
        raise ConfigError("compress needs --weights int8, int4 or nf4, or --low-rank-error E")
    from meshpar.compression import compress as compressed
    from meshpar.nn.quantized_kernel import Quantized

    how = Quantized(kind=weights, group=group) if weights else None
    echo(compressed(run, out, weights=how, low_rank_error=low_rank_error), json)
