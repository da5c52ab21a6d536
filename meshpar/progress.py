"""Progress messages. They go to standard error: standard output is for results, which programs may read."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from meshpar.errors import printable


def say(text: str) -> None:
    """Prints a line on standard error. Control characters, which a path may contain, are escaped."""
    print(printable(text), file=sys.stderr, flush=True)


@contextmanager
def busy(what: str, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Shows that a slow operation runs: a spinner with the elapsed time on a terminal, then a line with the total.

    Args:
      what: the operation, as in "compiling the step".
      quiet: print no line at the end.

    Yields:
      A function that prints a line above the spinner; where there is no terminal, it prints nothing.
    """
    show: Callable[[str], None] = lambda line: None
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
            show = lambda line: terminal.print(printable(line), markup=False, highlight=False, soft_wrap=True)
        yield show
    if not quiet:
        say(f"{what}: {time.perf_counter() - began:.1f} s")
