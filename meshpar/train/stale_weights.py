"""PipeDream-2BW: a step computes gradients at the parameters before the last update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import jax

from meshpar.parallel.batch import Batch
from meshpar.parallel.context import ParallelContext
from meshpar.train.gradients import Gradients
from meshpar.train.state import StatePlacement
from meshpar.train.strategy import Strategy

STALE = "stale"


class StaleWeights(Strategy):
    """Carries the parameters of a step to the next one, which computes its gradients at them.

    Memory: the parameters once more, sharded as their gradients.
    Source: Narayanan et al. 2021, arXiv:2006.09503.
    """

    key = STALE

    @classmethod
    def of(cls, ctx: ParallelContext) -> Self | None:
        schedule = ctx.parallel.pipeline  # also on one device, with which `verify` compares
        return cls() if schedule and schedule.is_stale else None

    def placed(self, placement: StatePlacement) -> Any:
        return placement.sharded

    def initial(self, params: Any, placed: Any) -> Any:
        return params

    def gradients(self, gradients: Callable[..., Gradients]) -> Callable[..., Gradients]:
        def at_stale(params: Any, batch: Batch, step: jax.Array, carried: Any) -> Gradients:
            found = gradients(carried[STALE], batch, step, carried)
            return replace(found, carried=found.carried | {STALE: params})

        return at_stale

    def is_countable(self, ctx: ParallelContext) -> bool:
        return ctx.rules.zero_stage != 1  # GSPMD gathers the stale weights whole, as it stores the present ones
