"""Weights of a mixture that change while a run trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from meshpar.config import Coerced, Config, Positive
from meshpar.data.round_robin import check_period, whole_weights

LEVELS = 100
"""A linear schedule changes the weights this often."""
_PARTS = 1000
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Phase(NamedTuple):
    """The weights of the parts, as integers, from a step on."""

    step: int
    weights: tuple[int, ...]


FROM_ONE_PART = (Phase(0, (1,)),)
"""The weights of data that are no mixture."""


class PiecewiseWeights(Config):
    """Weights that change at some steps.

    >>> PiecewiseWeights(steps=[0, 1000], weights=[[0.7, 0.3], [1, 1]]).phases
    (Phase(step=0, weights=(7, 3)), Phase(step=1000, weights=(1, 1)))
    """

    kind: Literal["piecewise"] = "piecewise"
    steps: Coerced[tuple[int, ...], Sequence[int]]
    """The steps from which the weights hold, ascending; the first is 0."""
    weights: Coerced[tuple[tuple[Weight, ...], ...], Sequence[Sequence[float]]]
    """The weights of all parts, for each of the steps."""

    @model_validator(mode="after")
    def _check(self) -> PiecewiseWeights:
        if len(self.steps) != len(self.weights):
            raise ValueError(f"{len(self.steps)} steps have {len(self.weights)} lists of weights")
        if (
            not self.steps
            or self.steps[0] != 0
            or any(b <= a for a, b in zip(self.steps, self.steps[1:], strict=False))
        ):
            raise ValueError(f"steps = {list(self.steps)} must begin with 0 and ascend")
        _check(self.weights)
        for weights in self.weights:
            check_period(weights, str(list(weights)))
        return self

    @property
    def phases(self) -> tuple[Phase, ...]:
        steps = zip(self.steps, self.weights, strict=True)
        return tuple(Phase(step, whole_weights(weights)) for step, weights in steps)


class LinearWeights(Config):
    """Shares of the rows that go in a line from the first to the last, in a hundred changes, rounded to a thousandth.

    >>> LinearWeights(first=[1, 0], last=[0, 1], num_steps=2).phases
    (Phase(step=0, weights=(3, 1)), Phase(step=1, weights=(1, 3)), Phase(step=2, weights=(0, 1)))
    """

    kind: Literal["linear"] = "linear"
    first: Coerced[tuple[Weight, ...], Sequence[float]]
    """The weights of all parts at the first step."""
    last: Coerced[tuple[Weight, ...], Sequence[float]]
    """The weights of all parts from step `num_steps` on."""
    num_steps: Positive
    """The steps that the change takes."""

    @model_validator(mode="after")
    def _check(self) -> LinearWeights:
        _check((self.first, self.last))
        return self

    @property
    def phases(self) -> tuple[Phase, ...]:
        num = min(LEVELS, self.num_steps)
        first, last = ([weight / sum(weights) for weight in weights] for weights in (self.first, self.last))
        phases = [Phase(self.num_steps, _rounded(last))]
        for i in reversed(range(num)):
            done = (i + 0.5) / num
            shares = [a + (b - a) * done for a, b in zip(first, last, strict=True)]
            phases.append(Phase(i * self.num_steps // num, _rounded(shares)))
        return tuple(reversed(phases))


WeightSchedule = Annotated[PiecewiseWeights | LinearWeights, Field(discriminator="kind")]
"""How the weights of a mixture change; selected by `kind`."""


def _check(lists: Sequence[Sequence[float]]) -> None:
    sizes = {len(weights) for weights in lists}
    if len(sizes) > 1:
        raise ValueError(f"the lists of weights have the lengths {sorted(sizes)}: each has a weight for each part")
    if any(not sum(weights) for weights in lists):
        raise ValueError("weights are all 0, so that there is no row to read")


def _rounded(shares: Sequence[float]) -> tuple[int, ...]:
    """Thousandths; a part that has a share keeps one."""
    whole = [max(round(share * _PARTS), int(share > 0)) for share in shares]
    return tuple(one // math.gcd(*whole) for one in whole)
