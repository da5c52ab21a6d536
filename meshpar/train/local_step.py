"""Runs the steps of a training with local updates: selects one of its compiled programs for each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from meshpar.parallel.batch import Batch
from meshpar.parallel.rounds import Rounds
from meshpar.train.program import Program, on_host
from meshpar.train.state import TrainState
from meshpar.train.step import Metrics, Step

SUMS = ("tokens", "skipped")
"""Metrics that are counts, which are summed over slices. The others are means over tokens."""


@dataclass(frozen=True, kw_only=True)
class LocalStep(Step):
    """The compiled steps of a training with local updates. The host selects one by the number of the step.

    Args:
      program: a step of every slice alone.
      rounds: when they end.
      outer: for each fragment: state -> state, at the end of its round, or `overlap_steps` later.
      reducing: for each fragment: the step after the end of its round, which also all-reduces the differences; none if
        `outer` all-reduces them.
      averaging: a step with gradients averaged over slices, before the first round; None if rounds begin at once.
    """

    rounds: Rounds
    outer: tuple[Program, ...]
    reducing: tuple[Program, ...] = ()
    averaging: Program | None = None

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Runs the next step. It waits for the device to read the number of the step; `at` does not."""
        return self.at(int(jax.device_get(state.step)) + 1)(state, batch)

    def at(self, index: int) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        program = self.program if index > self.rounds.start or self.averaging is None else self.averaging
        before = self.rounds.fragment(index - 1)
        if self.reducing and before is not None:
            program = self.reducing[before]
        ended = self.rounds.fragment(index - self.rounds.overlap_steps)
        if ended is None:
            return partial(self._run, program)

        def with_outer_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            state, metrics = self._run(program, state, batch)
            return self.outer[ended](state), metrics

        return with_outer_step

    def read(self, metrics: Metrics) -> dict[str, np.ndarray]:
        found = on_host(metrics)
        weights = found["tokens"] / max(found["tokens"].sum(), 1)
        return {
            name: x.sum(axis=0) if name in SUMS else np.tensordot(weights, x, 1).astype(x.dtype)
            for name, x in found.items()
        }
