"""The application, and what its verbs share."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, NoReturn

import typer

from meshpar.errors import ConfigError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False)]
Devices = Annotated[
    int | None,
    typer.Option(min=1, max=4096, help="Simulate so many CPU devices.", show_default="as many as the mesh has"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def check_file(option: str, path: Path) -> None:
    """Says that a file cannot be written before anything is compiled, which can take minutes.

    Raises:
      ConfigError: it is a folder, or its folder is not there or cannot be written.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path}: cannot be written: it is a folder")
    check_folder(option, path, path.parent)


def check_folder(option: str, path: Path, folder: Path) -> None:
    """The same of a folder. By writing: permission bits do not tell the whole truth, and root ignores them."""
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from None


def leave(code: int, text: str) -> NoReturn:
    """Prints the last words of a process, and ends it at once: threads that wait for data are not waited for."""
    typer.echo(f"meshpar: {text}", err=True)
    sys.stdout.flush()
    os._exit(code)


def write(option: str, path: Path, text: str) -> None:
    """Writes what was asked for by an option, or says that it cannot."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from None
