"""Progress messages. They go to standard error: standard output is for results, which programs may read."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from meshpar.errors import printable


def say(text: str) -> None:
    """Prints a line on standard error. Control characters, which a path may contain, are escaped."""
    print(printable(text), file=sys.stderr, flush=True)


@contextmanager
def busy(what: str, quiet: bool = False) -> Iterator[None]:
    """Shows that a slow operation runs: a spinner with the elapsed time on a terminal, then a line with the total.

    Args:
      what: the operation, as in "compiling the step".
      quiet: print no line.
    """
    began = time.perf_counter()
    with ExitStack() as stack:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            # A copy of the stream, because `inspection.program.compiling` redirects standard error while XLA compiles.
            terminal = Console(file=stack.enter_context(open(os.dup(sys.stderr.fileno()), "w")))
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            shown = Progress(*columns, console=terminal, transient=True, redirect_stdout=False, redirect_stderr=False)
            stack.enter_context(shown).add_task(what, total=None)
        yield
    if not quiet:
        say(f"{what}: {time.perf_counter() - began:.1f} s")
