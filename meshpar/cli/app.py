"""The application, and what its verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshpar.errors import ConfigError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False)]
Devices = Annotated[
    int | None, typer.Option(min=1, help="Simulate so many CPU devices.", show_default="as many as the mesh has")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def write(option: str, path: Path, text: str) -> None:
    """Writes what was asked for by an option, or says that it cannot."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from None
