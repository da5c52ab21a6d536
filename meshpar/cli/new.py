"""`meshpar new`: a small project, or a copy of one of the configs that come with meshpar."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from meshpar.cli.app import app
from meshpar.errors import ConfigError, suggestion

FILES = ("README.md", "config.yaml", "model.py", "test_model.py")
CONFIGS = Path(str(resources.files("meshpar.cli"))) / "configs"
"""In the repository, a link to its folder `configs`; a wheel holds the files."""


@app.command()
def new(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of the folder.", show_default=False)] = None,
    config: Annotated[
        str | None, typer.Option("--config", metavar="NAME", help="Copy this config of meshpar's, with its bases.")
    ] = None,
) -> None:
    """Creates a folder with a small project: a model, a config, a test and a README. With --config, only a config."""
    if (name is None) == (config is None):
        raise ConfigError(
            "new: name a folder for a project, as in `meshpar new mymodel`, or a config to copy, as in "
            "`meshpar new --config quickstart`; not both"
        )
    for path, text in _project(name) if name else _configs(config or ""):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        typer.echo(path)


def _project(name: str) -> Iterator[tuple[Path, str]]:
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
        yield folder / file, templates.joinpath(f"{file}.tmpl").read_text(encoding="utf-8").replace("NAME", name)


def _configs(name: str) -> Iterator[tuple[Path, str]]:
    """A config and those that it extends, in `configs/`, where the pages of the docs have them."""
    files = {str(path.relative_to(CONFIGS).with_suffix("")): path for path in sorted(CONFIGS.rglob("*.yaml"))}
    asked = name.removeprefix("configs/").removesuffix(".yaml")
    if asked not in files:
        fix = suggestion(asked, files, f"there are {', '.join(files)}")
        raise ConfigError(f"new: there is no config {name}; {fix}")
    found: dict[Path, str] = {}
    path: Path | None = files[asked]
    while path:
        text = path.read_text(encoding="utf-8")
        found[Path("configs") / path.relative_to(CONFIGS)] = text
        base = re.search(r"^extends: (\S+)", text, re.MULTILINE)
        path = path.parent / base[1] if base else None
    for to, text in found.items():
        if to.exists() and to.read_text(encoding="utf-8") != text:
            raise ConfigError(f"new: {to} already exists with other contents, and is not overwritten")
    yield from found.items()
