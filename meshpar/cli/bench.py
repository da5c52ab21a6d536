"""`meshpar bench`."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshpar.cli.app import AsJson, app
from meshpar.errors import ConfigError

if TYPE_CHECKING:
    from meshpar.collectives.bench import Bench

bench = typer.Typer(no_args_is_help=True, help="Measures what is here.")
app.add_typer(bench, name="bench")


SIZES = ("4KiB", "64KiB", "1MiB")


@bench.command()
def collectives(
    operation: Annotated[list[str] | None, typer.Option(help="One of the eight; may be given again.")] = None,
    size: Annotated[list[str] | None, typer.Option(help="Bytes; may be given again.")] = None,
    devices: Annotated[int, typer.Option(min=2, help="Simulate so many, where the devices are CPUs.")] = 8,
    json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw time against size: .png, .svg.")] = None,
) -> None:
    """Times every algorithm of a collective beside XLA's own, and what its table says."""
    operations = _known(operation or ["all_reduce"])
    sizes = [_bytes(text) for text in size or SIZES]
    if plot:
        _check_plot(plot)
    from meshpar.mesh import process

    process.simulate(devices)
    from meshpar.collectives.bench import bench as measure

    told = measure(operations, sizes)
    if plot:
        _draw(told, plot)
    typer.echo(json_format.dumps(told.as_json(), indent=2) if json else str(told))


def _known(operations: list[str]) -> list[Any]:
    from meshpar.collectives.plan import OPERATIONS
    from meshpar.errors import nearest

    for name in operations:
        if name not in OPERATIONS:
            near = nearest(name, OPERATIONS)
            meant = f"did you mean {near}? " if near else ""
            raise ConfigError(f"--operation {name}: no such collective; {meant}there are {', '.join(OPERATIONS)}")
    return operations


def _bytes(text: str) -> int:
    from meshpar.tree import parse_bytes

    try:
        return int(parse_bytes(text))
    except ValueError as error:
        raise ConfigError(f"--size {error}") from None


def _check_plot(path: Path) -> None:
    """Before anything is measured."""
    from importlib.util import find_spec

    if not find_spec("matplotlib"):
        raise ConfigError("--plot needs matplotlib, which is not here; install it with: pip install 'meshpar[plot]'")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {path}: write .png, .svg or .pdf")


def _draw(told: Bench, path: Path) -> None:
    from meshpar.collectives.draw import draw

    try:
        draw(told, path)
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written: {error.strerror}") from None
