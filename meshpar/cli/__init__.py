"""The command line: one file for each verb. Bad input ends with a message and exit code 2.

A verb imports most modules when it runs, so a misspelt verb or option is reported before anything heavy is imported.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import pkgutil
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from meshpar.cli.app import app, leave
from meshpar.errors import MeshparError, excerpt, printable
from meshpar.interop import user_code


def verbs(word: str | None = None) -> typer.Typer:
    """The application with the verb that a command line begins with; with all verbs if it begins with none."""
    files = [file.name for file in pkgutil.iter_modules(__path__)]
    for name in [word] if word in files else files:
        importlib.import_module(f"{__name__}.{name}")  # which registers the verb
    return app


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"meshpar {version('meshpar')}")
        raise typer.Exit


@app.callback()
def _meshpar(
    named: Annotated[
        list[Path] | None,
        typer.Option("--import", metavar="FILE", help="A Python file that CONFIG may import from any folder."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Declare a mesh and a name for each dim; train on any layout of devices, with the same numbers."""
    for path in named or []:
        user_code.name(path)


def main() -> None:
    """The entry point. Exit codes: 0, 1 for a failed run, 2 for bad input."""
    # Importing and tracing create millions of objects that are never freed. By default, Python would search them for
    # garbage after every 700 new ones.
    gc.set_threshold(400_000)
    # The threads of NumPy's BLAS, which meshpar hardly uses, would spin for 2^26 cycles before they sleep.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    try:
        verbs(next(iter(sys.argv[1:]), None))()
    except MeshparError as error:
        _end(str(error), error.exit_code)
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            raise
        _end(f"{excerpt(str(error.filename))}: {error.strerror}")
    except (RuntimeError, AssertionError) as error:
        # JAX has no error type of its own for a backend that cannot start.
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).name
        if raised_in != "xla_bridge.py" and not str(error).startswith("Unable to initialize backend"):
            raise
        asked = os.environ.get("JAX_PLATFORMS")
        what = f"that JAX_PLATFORMS={asked} names" if asked else "of this machine"
        why = str(error) or "no plugin for it is installed"
        fix = "unset JAX_PLATFORMS, or set JAX_PLATFORMS=cpu" if asked else "set JAX_PLATFORMS=cpu"
        _end(f"JAX cannot start the backend {what}:\n  {why}\n  {fix}; `meshpar env` shows what JAX finds")


def _end(text: str, code: int = 2) -> None:
    """Prints an error and exits. Control characters, which a config may contain, are escaped."""
    jax = sys.modules.get("jax")  # a verb that failed before it needed JAX did not import it
    if jax and jax.distributed.is_initialized():
        leave(code, text)  # at a normal exit JAX waits for the other processes
    typer.echo(f"meshpar: {printable(text)}", err=True)
    sys.exit(code)
