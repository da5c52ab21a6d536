"""Measures the speed of steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax

from meshpar.train.program import counts


@dataclass
class Stopwatch:
    """Measures the speed of steps, without compilation, evaluations, checkpoints and traces.

    Devices run behind the host, so every reading waits for the steps that were counted. The time between two readings
    is a lap.

    Args:
      since: when the lap began, in seconds; None before the first reading.
      tokens: int32[] of each step of the lap.
      waited_s: seconds in which the steps of the lap waited for their batches.
      rows: of a batch that is made of rows of arrays; None if it is made of tokens.
    """

    since: float | None = None
    tokens: list[jax.Array] = field(default_factory=list)
    waited_s: float = 0.0
    rows: int | None = None

    def count(self, tokens: jax.Array) -> None:
        self.tokens.append(tokens)

    def lap(self) -> dict[str, float]:
        """Ends the lap; returns its mean `step_s`, `tokens_per_s` or `rows_per_s`, and `data_wait`, the fraction spent
        on waiting.

        Returns nothing for the first lap, whose start is unknown.
        """
        tokens = counts(self.tokens)
        now = time.perf_counter()
        speed = {}
        if self.since is not None and tokens:
            elapsed_s = now - self.since
            rate = {"tokens_per_s": sum(tokens) / elapsed_s}
            if self.rows is not None:  # whatever their loss counts
                rate = {"rows_per_s": self.rows * len(tokens) / elapsed_s}
            speed = {"step_s": elapsed_s / len(tokens)} | rate | {"data_wait": self.waited_s / elapsed_s}
        self.since = now
        self.tokens = []
        self.waited_s = 0.0
        return speed

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time within as waiting for a batch."""
        began = time.perf_counter()
        yield
        self.waited_s += time.perf_counter() - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time within."""
        jax.block_until_ready(self.tokens)
        began = time.perf_counter()
        yield
        if self.since is not None:
            self.since += time.perf_counter() - began
