"""Traces a few steps with JAX's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import jax

from meshpar.train.loop.stopwatch import Stopwatch


@contextmanager
def profiled(
    folder: Path | None, first: int, last: int, stopwatch: Stopwatch
) -> Iterator[Callable[[int], AbstractContextManager[None]]]:
    """Yields a context for each step; the trace runs from the beginning of step `first` to the end of step `last`.

    Args:
      folder: where the trace is written; None for no trace.
      stopwatch: it is paused while the trace starts and while it is written.
    """
    with ExitStack() as trace:

        @contextmanager
        def step(index: int) -> Iterator[None]:
            if folder and index == first:
                with stopwatch.paused():
                    trace.enter_context(jax.profiler.trace(str(folder)))
            yield
            if folder and index == last:
                with stopwatch.paused():
                    trace.close()

        yield step
