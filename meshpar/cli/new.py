"""`meshpar new`."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from meshpar.cli.app import app
from meshpar.errors import ConfigError

FILES = ("README.md", "config.yaml", "model.py", "test_model.py")


@app.command()
def new(name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the folder.", show_default=False)]) -> None:
    """Creates a folder with a small project: a model, a config, a test and a README."""
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise ConfigError(f"new: {name!r} is not a valid name: use letters, digits, - and _, starting with a letter")
    folder = Path(name)
    try:
        folder.mkdir()
    except FileExistsError:
        raise ConfigError(f"new: {name} already exists, and is not overwritten") from None
    except OSError as error:
        raise ConfigError(f"new: {name} cannot be created here: {error.strerror}") from None
    templates = resources.files("meshpar.cli").joinpath("project")
    for file in FILES:
        text = templates.joinpath(f"{file}.tmpl").read_text(encoding="utf-8").replace("NAME", name)
        (folder / file).write_text(text, encoding="utf-8")
        typer.echo(folder / file)
