"""Learning rate schedules.

A schedule is a function of the number of updates so far. One more update at each end would have the rates 0 and
`final`, so that no update of a run is wasted on a rate of zero.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Literal, Self

import jax
import jax.numpy as jnp
import optax
import pydantic

from meshpar.config import Config, Count, Positive
from meshpar.errors import ConfigError, Problems

Fraction = Annotated[float, pydantic.Field(ge=0, le=1)]


class _Warmup(Config):
    """A linear rise to the peak; subclasses define the rest."""

    warmup_steps: Count = 0
    """Updates before the peak: update i uses (i + 1) / (warmup_steps + 1) of it."""

    def build(self, peak: float, num_steps: int) -> optax.Schedule:
        """Builds the schedule of a run.

        Args:
          peak: the largest learning rate.
          num_steps: length of the run.

        Returns:
          number of updates made, int32[] -> learning rate, float32[].

        Raises:
          ConfigError: the parts of the schedule are longer than the run.
        """
        problems = Problems()
        self.check(num_steps, problems)
        problems.raise_any(ConfigError, f"the learning rate schedule does not fit a run of {num_steps} steps:")

        def schedule(count: jax.typing.ArrayLike) -> jax.Array:
            now = jnp.asarray(count, jnp.float32)
            rise = jnp.minimum((now + 1) / (self.warmup_steps + 1), 1.0)
            return peak * rise * self._after_warmup(now, num_steps)

        return schedule

    def check(self, num_steps: int, problems: Problems) -> None:
        """Adds a problem for each field that does not fit a run of `num_steps`."""
        if self.warmup_steps > num_steps:
            where = "optim.schedule.warmup_steps"
            what = f"{self.warmup_steps} is more than num_steps = {num_steps}"
            problems.add(where, what, f"{where}={num_steps} or less, or num_steps={self.warmup_steps} or more")

    @abstractmethod
    def _after_warmup(self, now: jax.Array, num_steps: int) -> jax.Array:
        """The learning rate as a fraction of the peak; 1 during the warm-up."""


class Constant(_Warmup):
    """Stays at the peak to the end.

    >>> [round(float(Constant(warmup_steps=3).build(1.0, 8)(i)), 2) for i in range(6)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    """

    kind: Literal["constant"] = "constant"

    def _after_warmup(self, now: jax.Array, num_steps: int) -> jax.Array:
        return jnp.ones_like(now)


class _Decay(_Warmup):
    """A decay from the peak to a fraction of it; subclasses define its start and its form."""

    final: Fraction = 0.0
    """The learning rate at the end, as a fraction of the peak."""

    def _after_warmup(self, now: jax.Array, num_steps: int) -> jax.Array:
        start = self._start(num_steps)
        progress = jnp.clip((now - start) / max(num_steps - start, 1), 0.0, 1.0)
        return self.final + (1.0 - self.final) * self._fall(progress)

    def _start(self, num_steps: int) -> int:
        """The number of updates before the decay."""
        return self.warmup_steps

    @abstractmethod
    def _fall(self, progress: jax.Array) -> jax.Array:
        """A monotonic function [0, 1] -> [1, 0]."""


class Linear(_Decay):
    """Decays along a straight line, from the end of the warm-up.

    >>> [round(float(Linear(warmup_steps=1).build(1.0, 5)(i)), 2) for i in range(6)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    kind: Literal["linear"] = "linear"

    def _fall(self, progress: jax.Array) -> jax.Array:
        return 1.0 - progress


class Cosine(_Decay):
    """Decays along half a cosine wave, from the end of the warm-up.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983.

    >>> [round(float(Cosine(final=0.1).build(1.0, 4)(i)), 2) for i in range(5)]
    [1.0, 0.87, 0.55, 0.23, 0.1]
    """

    kind: Literal["cosine"] = "cosine"

    def _fall(self, progress: jax.Array) -> jax.Array:
        return (1.0 + jnp.cos(jnp.pi * progress)) / 2.0


class WSD(_Decay):
    """Warm-up, stable, decay: stays at the peak until near the end, so that a run can be extended before its decay.

    Source: Hu et al. 2024, arXiv:2404.06395; the form `1-sqrt`: Hägele et al. 2024, arXiv:2405.18392.

    >>> [round(float(WSD(decay_steps=4).build(1.0, 6)(i)), 2) for i in range(7)]
    [1.0, 1.0, 1.0, 0.5, 0.29, 0.13, 0.0]
    """

    kind: Literal["wsd"] = "wsd"
    decay_steps: Positive | None = None
    """Length of the decay. Default: `decay_fraction` of the run."""
    decay_fraction: Annotated[float, pydantic.Field(gt=0, le=1)] | None = None
    """Length of the decay, as a fraction of the run. Default: 0.2 without `decay_steps`."""
    shape: Literal["linear", "1-sqrt"] = "1-sqrt"
    """The form of the decay: a straight line, or 1 - sqrt(progress)."""

    @pydantic.model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.decay_steps is not None and self.decay_fraction is not None:
            raise ValueError("decay_steps and decay_fraction both set the length of the decay: give one of them")
        return self

    def check(self, num_steps: int, problems: Problems) -> None:
        super().check(num_steps, problems)
        length = self._length(num_steps)
        if length > num_steps - self.warmup_steps >= 0:
            where = f"optim.schedule.{'decay_fraction' if self.decay_steps is None else 'decay_steps'}"
            what = f"{self.warmup_steps} steps of warm-up and {length} of decay are more than {num_steps}"
            problems.add(where, what, f"a shorter decay{self._longer_run()}")

    def _longer_run(self) -> str:
        """Proposes a number of steps that suffices. A decay that is a fraction of the run grows with the run."""
        if self.decay_steps is not None:
            return f", or num_steps={self.warmup_steps + self.decay_steps} or more"
        stable = 1.0 - (self.decay_fraction or 0.2)
        if not stable:
            return ""
        rounded = self.warmup_steps / stable
        enough = (math.floor(rounded), math.ceil(rounded), math.ceil((self.warmup_steps + 0.5) / stable))
        num_steps = next(steps for steps in enough if steps - self.warmup_steps >= self._length(steps))
        return f", or num_steps={num_steps} or more"

    def _length(self, num_steps: int) -> int:
        if self.decay_steps is not None:
            return self.decay_steps
        return max(1, round((self.decay_fraction or 0.2) * num_steps))

    def _start(self, num_steps: int) -> int:
        return num_steps - self._length(num_steps)

    def _fall(self, progress: jax.Array) -> jax.Array:
        return 1.0 - (progress if self.shape == "linear" else jnp.sqrt(progress))


Schedule = Annotated[Constant | Linear | Cosine | WSD, pydantic.Field(discriminator="kind")]
