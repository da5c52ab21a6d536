"""Local updates: slices of the mesh train alone for some steps, then an outer optimizer moves them together.

A slice is all devices with one index on the axis of local updates. Each slice has its own parameters and its own state
of the optimizer, `optim`. After `every` steps, a round, the outer optimizer steps once, with the mean over slices of
`shared parameters - own parameters` as its gradient. Each slice then begins the next round at the shared parameters.

Communication: none across slices in a step. At the end of a round an all-reduce of the trained parameters: a device
sends 2(n-1)/n P bytes over the axis, for n slices and P bytes of its shards in at least float32. Per step these are
2(n-1)/n P / every bytes; with rounds that grow, 2(n-1)/n P R / T for R rounds in T steps. `compress` sends fewer bytes.

Memory: the shared parameters and the outer optimizer's state, in addition to the state of a slice; with `overlap_steps`
also the mean differences.

Source: Stich 2018, arXiv:1805.09767 (local SGD); Lin et al. 2018, arXiv:1808.07217 (post-local); Douillard et al. 2023,
arXiv:2311.08105 (DiLoCo); Douillard et al. 2025, arXiv:2501.18512 (streaming DiLoCo); Gu et al. 2023,
arXiv:2310.14423 (the quadratic synchronization rule).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import optax
import pydantic

from meshpar.collectives.powersgd import PowerSGD
from meshpar.collectives.reduction import Across, Exact, Reduce
from meshpar.config import Coerced, Config, Count, Positive, default
from meshpar.errors import Problems
from meshpar.parallel.rounds import Rounds, quadratic
from meshpar.sharding.rules import AxisRules

Rate = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
Decay = Annotated[float, pydantic.Field(ge=0, lt=1)]
KEY = "parallel.local"


class OuterAverage(Config):
    """Moves the shared parameters towards the mean of the slices' parameters, by the fraction `lr`: local SGD for 1."""

    shorthand: ClassVar = "kind"
    kind: Literal["average"] = "average"
    lr: Rate = 1.0
    """The fraction of the distance to the mean."""

    def build(self) -> optax.GradientTransformation:
        return optax.sgd(self.lr)


class OuterNesterov(Config):
    """Nesterov's momentum, with DiLoCo's defaults. Memory: one moment a parameter."""

    shorthand: ClassVar = "kind"
    kind: Literal["nesterov"] = "nesterov"
    lr: Rate = 0.7
    """The learning rate of a round."""
    momentum: Decay = 0.9
    """Decay of the sum of the differences."""

    def build(self) -> optax.GradientTransformation:
        return optax.sgd(self.lr, self.momentum, nesterov=True)


class OuterAdam(Config):
    """Adam without weight decay. Memory: two moments a parameter."""

    shorthand: ClassVar = "kind"
    kind: Literal["adam"] = "adam"
    lr: Rate = 0.3
    """The learning rate of a round."""
    b1: Decay = 0.9
    """Decay of the mean of the differences."""
    b2: Decay = 0.95
    """Decay of the mean of the squared differences."""
    eps: Rate = 0.1
    """Added to the root mean square; large, as differences are larger than gradients."""

    def build(self) -> optax.GradientTransformation:
        return optax.adam(self.lr, self.b1, self.b2, self.eps)


Outer = Annotated[OuterAverage | OuterNesterov | OuterAdam, pydantic.Field(discriminator="kind")]


class LocalUpdates(Config):
    """Slices of an axis train alone, and an outer optimizer moves them together at the end of each round."""

    axis: str = "replica"
    """The axis of the slices, an axis of the batch over which no parameter is sharded."""
    every: Positive
    """The steps of a round."""
    growth: Rate | None = None
    """Quadratic synchronization: a round at learning rate lr has floor((growth / lr)^2) steps, but at least `every`.
    Default: `every`."""
    start: Count = 0
    """Synchronous steps before the first round (post-local SGD)."""
    outer: Coerced[Outer, str | dict[str, Any]] = default(OuterAverage())
    """The optimizer of the shared parameters."""
    fragments: Positive = 1
    """Parts of the model whose rounds end in turn, `every / fragments` steps apart (streaming DiLoCo). Fragment i of n
    has every n-th layer, from layer i on; the last also has what is in no layer."""
    overlap_steps: Count = 0
    """Steps from the end of a round to its outer step, during which differences are all-reduced (streaming DiLoCo)."""
    mixing: Decay = 0.5
    """With `overlap_steps`: the weight of a slice's own parameters beside the new shared ones."""
    compress: Coerced[Across, str | dict[str, Any]] = default(Exact())
    """Format in which differences are all-reduced; `exact` is at least float32."""
    resize: Literal["refuse", "average"] = "refuse"
    """A checkpoint of another number of slices is refused, or each slice begins at their mean."""

    @property
    def reduction(self) -> Reduce | None:
        """How differences are summed over slices; None for XLA's own all-reduce."""
        return None if isinstance(self.compress, Exact) else Reduce(across=self.compress)

    def rounds(self, num_steps: int, learning_rate: Callable[[Any], Any]) -> Rounds:
        """The rounds of a run.

        Args:
          learning_rate: numbers of updates made -> learning rates.

        >>> list(LocalUpdates(every=3, start=2).rounds(8, lambda updates: updates).ends)
        [5, 8]
        """
        last = num_steps - self.overlap_steps
        if self.growth is None:
            apart = self.every // self.fragments
            ends = range(self.start + apart, last + 1, apart)
        else:
            ends = quadratic(self.every, self.growth, learning_rate, self.start, last)
        return Rounds(ends, self.start, self.fragments, self.overlap_steps)

    def check_steps(self, num_steps: int, problems: Problems) -> None:
        """Adds a problem if a run has steps after the last outer step, or is shorter than a round."""
        steps = num_steps - self.start - self.overlap_steps
        if steps >= self.every and (self.growth is not None or steps % self.every == 0):
            return
        fixed = num_steps - steps
        before = f"{KEY}.start = {self.start}"
        if self.overlap_steps:
            before += f" and before the last {self.overlap_steps}"
        what = f"{steps} steps after {before} cannot be divided into rounds of {self.every} steps"
        fits = fixed + max(1, steps // self.every) * self.every
        problems.add("num_steps", what, f"num_steps={fits}: the shared parameters change only when a round ends")

    def check_state(self, ema: float | None, master: Any, params: Any, problems: Problems) -> None:
        """Adds a problem for each part of a training's state that slices cannot have.

        Args:
          ema: the decay of the average of the parameters; None without it.
          master: the dtype of the optimizer's copy of the parameters; None without one.
          params: the dtype of the parameters.
        """
        if ema:
            what = "a slice would average its own parameters, and the next round begins at others"
            problems.add("optim.ema", what, "optim.ema=null")
        if master:
            what = "the optimizer's copy of the parameters in a slice would not see the outer step"
            problems.add("precision.master", what, f"precision.master=null, or {KEY}=null")
        if params == "bfloat16":
            what = "bfloat16 has too few digits for the small steps of the shared parameters"
            problems.add("precision.params", what, f"precision.params=float32, or {KEY}=null")

    def check(self, rules: AxisRules, sizes: Mapping[str, int], is_manual: bool, problems: Problems) -> None:
        """Adds a problem if the axis cannot have slices under these rules.

        Args:
          sizes: of the mesh's axes.
        """
        if not is_manual:
            what = "GSPMD compiles one step for all devices, and sums gradients over all of them"
            problems.add(KEY, what, f"lowering=manual, or {KEY}=null")
        key = f"{KEY}.axis"
        if sizes.get(self.axis, 1) == 1:
            larger = [axis for axis in rules["batch"] if sizes.get(axis, 1) > 1]
            fix = f"{key}={larger[0]}, or mesh.{self.axis}=2" if larger else f"mesh.{self.axis}=2"
            problems.add(key, f"the mesh has one slice along {self.axis}, so there is nothing to average", fix)
        elif self.axis not in rules["batch"]:
            what = f"no rows of the batch are sharded over {self.axis}: its slices would all train on the same rows"
            problems.add(key, what, f"rules.batch with {self.axis}, or another axis")
        if self.every % self.fragments:
            fits = max(n for n in range(1, self.fragments) if self.every % n == 0)
            what = f"the rounds of {self.fragments} fragments cannot end {self.every} / {self.fragments} steps apart"
            problems.add(f"{KEY}.fragments", what, f"{KEY}.fragments={fits}")
        if self.fragments > 1 and rules["layers"]:
            what = "a device has the layers of its stage, and would have nothing to send for most fragments"
            problems.add(f"{KEY}.fragments", what, f"{KEY}.fragments=1, or no preset pipeline")
        if self.fragments > 1 and isinstance(self.compress, PowerSGD):
            what = "powersgd carries matrices of whole stacks of layers from round to round"
            problems.add(f"{KEY}.compress", what, f"{KEY}.compress=int8, or {KEY}.fragments=1")
        longest = min(self.every // self.fragments, self.every - 1)
        if self.overlap_steps > longest:
            what = "the next round would end before the outer step of this one"
            problems.add(f"{KEY}.overlap_steps", what, f"{KEY}.overlap_steps={longest} or less")
        if self.overlap_steps and rules["layers"]:
            what = "stages of a pipeline run different operations at a time, and an all-reduce waits for all devices"
            problems.add(f"{KEY}.overlap_steps", what, f"{KEY}.overlap_steps=0, or no preset pipeline")
        for name, others in {"fragments": self.fragments > 1, "overlap_steps": self.overlap_steps > 0}.items():
            if others and self.growth is not None:
                what = f"the last round of a run may be too short for {KEY}.{name}"
                problems.add(f"{KEY}.growth", what, f"{KEY}.growth=null, or no {KEY}.{name}")
        for dim, axes in rules.table.items():
            if dim != "batch" and self.axis in axes:
                what = f"{dim} is sharded over {self.axis}, and a slice that trains alone has all of it"
                problems.add(key, what, f"rules.{dim} without {self.axis}, or another axis")
