"""What a person reads while they wait: on standard error, so that standard output stays a program's to read."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    """Prints a line on standard error."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def busy(what: str, quiet: bool = False) -> Iterator[None]:
    """Shows what takes long: a terminal gets a spinner with the time so far; elsewhere a line says how long it took.

    Args:
      what: as in "compiling the step".
      quiet: say nothing where there is no terminal.
    """
    began = time.perf_counter()
    if not sys.stderr.isatty():
        yield
        if not quiet:
            say(f"{what}: {time.perf_counter() - began:.1f} s")
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    # A copy of the stream: while XLA compiles, `compiling` holds back what goes to the stream itself.
    with open(os.dup(sys.stderr.fileno()), "w") as terminal:
        console = Console(file=terminal)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as shown:
            shown.add_task(what, total=None)
            yield
    if not quiet:
        say(f"{what}: {time.perf_counter() - began:.1f} s")
