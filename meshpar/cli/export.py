"""`meshpar export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from meshpar.cli.app import app
from meshpar.errors import ConfigError


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or the config of a run.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    format: Annotated[
        Literal["stablehlo", "onnx", "hf"], typer.Option(metavar="FORMAT", help="What to write: stablehlo, onnx or hf.")
    ] = "stablehlo",
    platforms: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="StableHLO only: cpu, cuda, rocm, tpu.", show_default="cpu")
    ] = None,
) -> None:
    """Writes the last checkpoint of a run for programs without meshpar. Overwrites nothing.

    stablehlo is a program of any batch size and length, with its parameters in safetensors beside it; onnx is for ONNX
    Runtime; hf is a folder that Hugging Face's libraries read.
    """
    if platforms is not None and format != "stablehlo":
        raise ConfigError(f"--platforms is for --format stablehlo, and not for {format}")
    from meshpar import convert
    from meshpar import export as exports

    if format == "stablehlo":
        exports.stablehlo(run, out, [name for name in (platforms or "cpu").split(",") if name])
    elif format == "onnx":
        exports.onnx(run, out)
    else:
        convert.to_hf(run, out)
    typer.echo(f"{out}: written")
