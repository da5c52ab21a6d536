"""The application, and the options and functions that its verbs share."""

from __future__ import annotations

import json as json_format
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from tempfile import TemporaryFile
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from meshpar.errors import ConfigError, RunError, printable
from meshpar.regular_files import remote
from meshpar.store import local

TRAINED = {"CONFIG|DIR", "RUN", "RUN...", "DIR"}
"""What the arguments are called that name a trained run."""


class _Command(typer.core.TyperCommand):
    """A verb whose paths are local: a remote address would become a folder called `s3:`. Trained runs are copied."""

    def invoke(self, ctx: Any) -> Any:
        for param in self.params:
            given = ctx.params.get(param.name or "")
            is_read = not ctx.params.get("from_hf")  # `convert` writes it then
            if param.param_type_name == "argument" and param.metavar in TRAINED and is_read:
                ctx.params[param.name] = given = _copied(given)
            for path in given if isinstance(given, (list, tuple)) else [given]:
                if isinstance(path, PurePath) and (problem := remote(path)):
                    where = str(param.opts[0] if param.param_type_name == "option" else param.name)
                    raise ConfigError(f"{where}: {'; '.join(problem)}")
        return super().invoke(ctx)


def _copied(given: Any) -> Any:
    """Paths with the runs at addresses of stores copied to local folders."""
    if isinstance(given, (list, tuple)):
        return [_copied(path) for path in given]
    return local(Path(given)) if isinstance(given, PurePath) else given


class Verbs(typer.Typer):
    """Verbs that take only local paths, and trained runs of stores."""

    def command(self, name: str | None = None, **options: Any) -> Any:
        options.setdefault("cls", _Command)
        return super().command(name, **options)


app = Verbs(no_args_is_help=True, pretty_exceptions_enable=False)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False)]
Devices = Annotated[
    int | None,
    typer.Option(min=1, max=4096, help="Number of CPU devices to simulate.", show_default="as many as the mesh has"),
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Compile every program, and store none on disk.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def echo(result: Any, json: bool, err: bool = False) -> None:
    """Prints a result, as text or as JSON, in the first process."""
    echo_either(str(result), result.as_json(), json, err)


def echo_either(text: str, data: Any, json: bool, err: bool = False) -> None:
    """Prints a text, or its data as JSON, in the first process."""
    if is_first():
        typer.echo(json_format.dumps(data, indent=2) if json else text, err=err)


def origin() -> str:
    """The command line with the versions and the date, for the foot of a page."""
    from datetime import UTC, datetime
    from importlib.metadata import version
    from shlex import join

    command = printable(join(["meshpar", *sys.argv[1:]]), keep="")
    return f"{command} - meshpar {version('meshpar')}, jax {version('jax')}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def is_first() -> bool:
    """Whether this process prints, because it is the first that a launcher started, or the only one."""
    from meshpar.mesh.join import place

    mine = place()
    return mine is None or mine.index == 0


def use_cache(no_cache: bool) -> None:
    """Turns the persistent compilation cache on or off, before the first program is compiled."""
    from meshpar.mesh import compilation_cache

    if no_cache:
        compilation_cache.disable()
    else:
        compilation_cache.enable()


@contextmanager
def writing(option: str, path: Path, verb: str = "written") -> Iterator[None]:
    """Turns an OSError into a ConfigError about the option that names the path."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be {verb}: {error.strerror}") from None


def check_file(option: str, path: Path) -> None:
    """Checks that a file can be written, before minutes are spent on compiling.

    Raises:
      ConfigError: the path is a folder, or its folder does not exist or cannot be written.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path}: cannot be written: it is a folder")
    check_folder(option, path, path.parent)


def check_folder(option: str, path: Path, folder: Path) -> None:
    """Checks that a folder can be written by writing a file: permission bits are unreliable, and root ignores them."""
    with writing(option, path), TemporaryFile(dir=folder):
        pass


def leave(code: int, text: str) -> NoReturn:
    """Prints a last message and ends the process at once, without waiting for threads that read data."""
    typer.echo(f"meshpar: {printable(text)}", err=True)
    sys.stdout.flush()
    os._exit(code)


@contextmanager
def leaving() -> Iterator[None]:
    """Ends the process as a run within ends, if that fails or a signal stops it."""
    from meshpar.train.loop.signals import Interrupted

    try:
        yield
    except (RunError, Interrupted) as ended:
        leave(ended.exit_code, str(ended))


def write(option: str, path: Path, text: str) -> None:
    """Writes the file that an option names."""
    with writing(option, path):
        path.write_text(text, encoding="utf-8")
