"""The `experts:` section of a model's config."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import pydantic

from meshpar.config import Config, Count, Positive, Section, default
from meshpar.errors import Problems
from meshpar.parallel.context import ParallelContext

Weight = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]


class Balance(Config):
    """How experts are kept equally loaded.

    - `loss`: adds `weight * num * sum_e load[e] * score[e]` to the loss of each layer, where `score[e]` is the mean
      score of expert e, and `load[e]` the fraction of all choices that went to it. Both are over all tokens of a step
      that count, so the loss is the same on any number of devices.
    - `bias`: adds a bias to the scores by which experts are selected, and changes it by `weight` after each step, up
      for an expert that had fewer tokens than the mean, down for one that had more. There is no loss.

    Source: Fedus et al. 2021, arXiv:2101.03961; Qiu et al. 2025, arXiv:2501.11873 (the load of all devices); Wang et
      al. 2024, arXiv:2408.15664 (bias).
    """

    shorthand: ClassVar = "kind"
    kind: Literal["loss", "bias"] = "loss"
    """`loss` adds a loss, `bias` changes the selection without a loss."""
    weight: Weight = 0.01
    """The weight of the loss; or by how much a bias changes in a step, usually 0.001."""
    load: Literal["step", "last_step"] = "step"
    """Which load the loss uses: of this step, or of the last one, as microbatches and pipelines need."""

    @property
    def needs_one_pass(self) -> bool:
        """Whether the layers have to compute all tokens of a step at once."""
        return self.kind == "loss" and self.load == "step"

    @property
    def carried(self) -> Literal["load", "bias"] | None:
        """The parameter of a router that each step changes; None if there is none."""
        if self.kind == "bias":
            return "bias"
        return "load" if self.load == "last_step" else None


class Experts(Config):
    """Replaces the MLPs of blocks by experts; each token uses a few of them."""

    num: Positive
    """Number of routed experts."""
    per_token: Positive
    """Number of routed experts that each token uses."""
    intermediate_size: Positive
    """Width of the hidden layer of one expert."""
    first_dense: Count = 0
    """How many of the first layers have an MLP instead of experts (DeepSeek-V3)."""
    every: Positive = 1
    """After `first_dense`, layers whose number from 1 is a multiple of this have experts, the others an MLP. Hugging
    Face: `decoder_sparse_step`."""
    shared: Count = 0
    """Number of further experts that all tokens use, computed as one MLP."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How the router turns logits into scores."""
    normalize: bool = True
    """Whether the scores of a token's experts are divided by their sum."""
    scale: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] = 1.0
    """Multiplies the weights of a token's experts."""
    groups: Positive = 1
    """Number of groups of experts. A token selects groups first, by the sum of their two best scores."""
    groups_per_token: Positive = 1
    """The number of groups that a token selects its experts from."""
    dispatch: Literal["dropless", "capacity"] = "dropless"
    """`dropless` computes every choice. `capacity` gives each expert a fixed number of places in a row; tokens beyond
    it skip the expert."""
    capacity_factor: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] = 1.25
    """Places of an expert, as a multiple of those that a balanced router needs."""
    balance: Section[Balance | None] = default(None)
    """How experts are kept equally loaded. Default: they are not."""
    z_loss: Weight = 0.0
    """Weight of the router's z-loss, the mean square of the log-sum-exp of its logits; usually 0.001."""

    @pydantic.model_validator(mode="after")
    def _selects_enough(self) -> Experts:
        if self.per_token > self.num:
            raise ValueError(f"per_token = {self.per_token} is more than num = {self.num}, the number of experts")
        if self.num % self.groups:
            raise ValueError(f"num = {self.num} experts cannot be divided into groups = {self.groups}")
        if self.groups_per_token > self.groups:
            raise ValueError(f"groups_per_token = {self.groups_per_token} is more than groups = {self.groups}")
        available = self.num // self.groups * self.groups_per_token
        if self.per_token > available:
            what = f"groups_per_token = {self.groups_per_token} groups have {available} experts"
            raise ValueError(f"per_token = {self.per_token}, but {what}")
        return self

    def are_in(self, layer: int) -> bool:
        """Whether the layer with this index, from 0, has experts.

        >>> [layer for layer in range(8) if Experts(num=2, per_token=1, intermediate_size=4, every=2).are_in(layer)]
        [1, 3, 5, 7]
        """
        return layer >= self.first_dense and (layer + 1) % self.every == 0

    def capacity(self, seq_len: int) -> int:
        """How many tokens of a row of `seq_len` an expert has places for; 0 if the factor is too small for one.

        >>> Experts(num=8, per_token=2, intermediate_size=4, capacity_factor=1.25).capacity(64)
        20
        """
        return min(seq_len, int(self.capacity_factor * self.per_token * seq_len / self.num))

    def describe(self, ctx: ParallelContext, seq_len: int) -> str:
        """Says where the experts are stored, and how tokens are dispatched to them."""
        axes = ctx.dispatch("experts")
        shards = math.prod(ctx.mesh.shape[axis] for axis in axes)
        where = f"{self.num // shards} on each device along {', '.join(axes)}" if axes else "all on each device"
        places = f", {self.capacity(seq_len)} places of an expert for a row" if self.dispatch == "capacity" else ""
        return f"{self.num} experts, {where}; a token uses {self.per_token + self.shared}; {self.dispatch}{places}"

    def without_training(self) -> Experts:
        """Resets the fields that matter only in training, if no choice is dropped: dispatch and auxiliary losses."""
        names = ["dispatch", "capacity_factor", "z_loss"]
        if self.balance and self.balance.kind == "loss":
            names.append("balance")
        return self.model_copy(update={name: Experts.model_fields[name].default for name in names})

    def check(self, ctx: ParallelContext, seq_len: int, problems: Problems) -> None:
        """Reports a dispatch or a balance that cannot work on this mesh, or with rows of this length."""
        if ctx.parallel.expert:
            num_shards = math.prod(ctx.mesh.shape[axis] for axis in ctx.dispatch("experts"))
            ctx.parallel.expert.check(self.dispatch, num_shards, problems)
        if self.balance and self.balance.needs_one_pass and ctx.num_passes > 1:
            what = f"step: the first of {ctx.num_passes} microbatches ends before the load of all is known"
            problems.add("model.experts.balance.load", what, "model.experts.balance.load=last_step")
        if self.dispatch != "capacity":
            return
        if not self.capacity(seq_len):
            what = (
                f"{self.capacity_factor:g} gives an expert no place for a row of {seq_len} tokens: all would be dropped"
            )
            least = self.num / (self.per_token * seq_len)
            problems.add("model.experts.capacity_factor", what, f"model.experts.capacity_factor={max(1.25, least):g}")
        if shared := ctx.axes("seq"):
            what = f"capacity: its places are for the tokens of a whole row, which {', '.join(shared)} shards"
            problems.add("model.experts.dispatch", what, "model.experts.dispatch=dropless")
