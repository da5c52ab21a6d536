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
        Literal["stablehlo", "onnx", "hf", "peft"],
        typer.Option(metavar="FORMAT", help="What to write: stablehlo, onnx, hf or peft."),
    ] = "stablehlo",
    platforms: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="StableHLO only: cpu, cuda, rocm, tpu.", show_default="cpu")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="PEFT only: the base model.", show_default="init.from_hf of the run"),
    ] = None,
) -> None:
    """Writes the last checkpoint of a run for programs without meshpar. Overwrites nothing.

    stablehlo is a program of any batch size and length, with its parameters in safetensors beside it; onnx is for ONNX
    Runtime; hf is a folder that Hugging Face's libraries read; peft is an adapter for the library PEFT, of a run with
    LoRA.
    """
    if platforms is not None and format != "stablehlo":
        raise ConfigError(f"--platforms is for --format stablehlo, and not for {format}")
    if base is not None and format != "peft":
        raise ConfigError(f"--base is for --format peft, and not for {format}")
    from meshpar import convert
    from meshpar import export as exports

    if format == "stablehlo":
        exports.stablehlo(run, out, [name for name in (platforms or "cpu").split(",") if name])
    elif format == "onnx":
        exports.onnx(run, out)
    elif format == "peft":
        convert.to_peft(run, out, base)
    else:
        convert.to_hf(run, out)
    typer.echo(f"{out}: written")
