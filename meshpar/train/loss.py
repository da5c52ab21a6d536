"""What a loss says of its rows: sums and a count, so that means are taken over all devices' tokens."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pydantic

from meshpar.config import Config, Target
from meshpar.errors import ConfigError, Problems
from meshpar.parallel import tensor
from meshpar.parallel.outputs import Outputs
from meshpar.sharding.rules import AxisRules
from meshpar.tree import flatten_with_paths, map_with_path

MASKS = re.compile("mask|weight|valid|padding|segments", re.IGNORECASE)
"""Names of arrays that say which rows or tokens count."""

Batch = dict[str, jax.Array]
TEACHER = "teacher"
"""The array of a batch that holds the teacher's logits."""


@dataclass(frozen=True)
class LossSums:
    """What a loss says of the rows at hand.

    Args:
      loss: float[]. The sum of their losses.
      count: int32[]. Of what it is the sum: tokens, rows, pixels. Or float[], the sum of their weights.
      metrics: name -> float[]. Other sums over the same, reported as means.
      carried: what the next step gets, like what this one got: batch statistics, for instance.
    """

    loss: jax.Array
    count: jax.Array
    metrics: dict[str, jax.Array] = field(default_factory=dict)
    carried: Any = field(default_factory=dict)

    @property
    def sums(self) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """What is added up over microbatches and devices."""
        return self.loss, self.count, self.metrics


jax.tree_util.register_dataclass(LossSums, ["loss", "count", "metrics", "carried"], [])

Loss = Callable[[Any, Batch, jax.Array | None, Any], LossSums]
"""(params, batch, key, carried) -> `LossSums`, of the rows at hand."""


def as_loss_sums(found: Any, rows: jax.Array, carried: Any, hands_on: bool) -> LossSums:
    """What a user's loss returns, means over the rows or a `LossSums`, as sums.

    Args:
      found: a mean; (mean, metrics); (mean, metrics, carried); or a `LossSums`.
      carried: what the loss was given to carry; an empty dict where it carries nothing.
      hands_on: whether the loss has to return what it carries, if there is any.

    Raises:
      ConfigError: it is none of these; or what it carries is missing, or is not like what it was given.
    """
    hands_on = hands_on and bool(jax.tree.leaves(carried))
    tally = found if isinstance(found, LossSums) else _of_means(found, rows, carried, hands_on)
    problems = Problems()
    sums = {"the loss": tally.loss, "the count": tally.count}
    for name, x in (sums | {f"metrics[{name!r}]": x for name, x in tally.metrics.items()}).items():
        if jnp.shape(x):
            problems.add(name, f"has the shape {list(jnp.shape(x))}, and has to be one number", "x.mean(), or x.sum()")
    if not jnp.issubdtype(jnp.result_type(tally.loss), jnp.floating):
        problems.add("the loss", f"is {jnp.result_type(tally.loss)}, which has no gradient", "a floating-point number")
    if hands_on:
        _check_carried(tally.carried, carried, problems)
    problems.raise_any(ConfigError, "what the loss returns cannot be trained on:")
    weighted = jnp.issubdtype(jnp.result_type(tally.count), jnp.floating)
    count = tally.count if weighted else jnp.asarray(tally.count, jnp.int32)
    after = flatten_with_paths(tally.carried) if hands_on else {}
    return replace(tally, count=count, carried=map_with_path(lambda path, x: after.get(path, x), carried))


def _of_means(found: Any, rows: jax.Array, carried: Any, hands_on: bool) -> LossSums:
    parts = list(found) if isinstance(found, tuple) else [found]
    metrics = parts[1] if len(parts) > 1 else {}
    numbers = [parts[0] if parts else None, *(metrics.values() if isinstance(metrics, Mapping) else [None])]
    if len(parts) > 3 or not all(isinstance(x, (jax.Array, np.ndarray, np.generic, int, float)) for x in numbers):
        shown = ", ".join("array" if isinstance(part, jax.Array) else type(part).__name__ for part in parts)
        raise ConfigError(f"the loss returns ({shown}); give a mean, (mean, metrics), or (mean, metrics, carried)")
    if hands_on and len(parts) < 3:
        what = f"the loss is given {', '.join(map(str, carried))} to carry, and does not return what becomes of it"
        fix = "return (mean, metrics, carried); of an NNX model, carried is nnx.state(model, nnx.Not(nnx.Param))"
        raise ConfigError(f"{what}; {fix}")
    num_rows = jnp.ones_like(rows).sum(dtype=jnp.int32)

    def total(x: Any) -> jax.Array:
        return x * num_rows.astype(jnp.result_type(x))

    new = parts[2] if len(parts) > 2 else carried
    return LossSums(total(parts[0]), num_rows, {name: total(x) for name, x in metrics.items()}, new)


def _check_carried(new: Any, given: Any, problems: Problems) -> None:
    """Adds where what a loss carries is not like what it was given."""
    after, before = flatten_with_paths(new), flatten_with_paths(given)
    for path in (path for path in before if path not in after):
        problems.add(f"carried.{path}", "is not returned", "return all that the loss was given to carry")
    for path in (path for path in after if path not in before):
        problems.add(f"carried.{path}", "was not given to the loss", "add it to what `carried` returns first")
    for path in (path for path in before if path in after):
        old, x = jax.typeof(before[path]), jax.typeof(after[path])
        if (old.shape, old.dtype) != (x.shape, x.dtype):
            problems.add(f"carried.{path}", f"is {old.str_short()} before the step and {x.str_short()} after it")


def warn_of_masks(names: set[str], num_microbatches: int) -> None:
    """Warns that a mean in each microbatch is no mean over the batch, if the batch has a mask."""
    if masks := sorted(name for name in names if MASKS.search(name)):
        what = f"the loss returns a mean, and the batch has {', '.join(masks)}: if not all rows or tokens count, the"
        what += f" mean of {num_microbatches} microbatches' means is not the mean of the batch"
        warnings.warn(f"{what}; return meshpar.LossSums(sum, count), which is exact", UserWarning, stacklevel=2)


class Distill(Config):
    """A teacher, whose distribution over the next token the model learns beside the text's.

    The loss is `(1 - weight) * cross entropy + weight * temperature^2 * KL(teacher || model)`, both distributions of
    the divergence softened by the temperature.

    Source: Hinton et al. 2015, arXiv:1503.02531.
    """

    teacher: Path
    """The run directory of the teacher: its last checkpoint, and the config that is kept there."""
    temperature: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] = 1.0
    weight: Annotated[float, pydantic.Field(ge=0, le=1)] = 0.5
    """Of the divergence; the cross entropy has the rest."""
    rules: AxisRules | None = None
    """Where the teacher's parameters lie, on the mesh of the run. Default: the run's rules."""

    def add(self, nll: jax.Array, logits: jax.Array, teacher: jax.Array, vocab_size: int) -> jax.Array:
        """The loss of each token, from its cross entropy and both models' logits."""
        kl = tensor.divergence(logits, teacher, vocab_size, self.temperature)
        return (1 - self.weight) * nll + self.weight * self.temperature**2 * kl


class LossConfig(Config):
    """What is minimized: the next token's cross entropy, and what is added to it; or a loss of the user's own.

    Evaluations leave out what is added, so that runs can be compared.
    """

    shorthand: ClassVar = "target"
    target: Target | None = None
    """Of a model that is imported: `package.module:name` of its own loss; see `interop.flax_model`."""
    label_smoothing: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.0
    """The part of the target's probability that is spread evenly over the vocabulary."""
    z_loss: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the squared logarithm of the softmax's denominator; 1e-4 keeps logits from drifting."""

    @pydantic.model_validator(mode="after")
    def _one_loss(self) -> LossConfig:
        if self.target and (self.label_smoothing or self.z_loss):
            raise ValueError("label_smoothing and z_loss are of the next token's cross entropy, not of a target")
        return self

    def build(self, apply: Callable[..., jax.Array], vocab_size: int, distill: Distill | None = None) -> Loss:
        """The loss of a step; without any of these settings it is `next_token_loss(apply, vocab_size)`."""

        def each(logits: jax.Array, targets: jax.Array, batch: Batch) -> jax.Array:
            nll = tensor.cross_entropy(logits, targets, vocab_size, self.label_smoothing, self.z_loss)
            return distill.add(nll, logits, batch[TEACHER], vocab_size) if distill else nll

        return _summed(apply, each, learns=True)


def next_token_loss(apply: Callable[..., jax.Array], vocab_size: int) -> Loss:
    """Cross entropy of `targets`, those that are -1 not counted; the model's auxiliary losses are only reported.

    Args:
      apply: (params, batch, key) -> logits [batch, seq, vocab], local shards of the vocabulary; or `Outputs`.
      vocab_size: logits at or beyond it are padding.
    """
    each = lambda logits, targets, batch: tensor.cross_entropy(logits, targets, vocab_size)
    return _summed(apply, each, learns=False)


def _summed(apply: Callable[..., Any], each: Callable[..., jax.Array], learns: bool) -> Loss:
    """The sum of what each token costs.

    Args:
      each: (logits, targets, batch) -> [batch, seq].
      learns: whether the model's auxiliary losses are added.
    """

    def loss(params: Any, batch: Batch, key: jax.Array | None, carried: Any) -> LossSums:
        counted = batch["targets"] >= 0
        made = apply(params, batch, key)
        outputs = made if isinstance(made, Outputs) else Outputs(made)
        costs = each(outputs.logits, jnp.where(counted, batch["targets"], 0), batch)
        total = jnp.where(counted, costs, jnp.zeros_like(costs)).sum()
        count = counted.sum(dtype=jnp.int32)
        metrics = outputs.sums(count)
        for name in outputs.losses if learns else ():
            total += metrics[name].astype(total.dtype)
        return LossSums(total, count, metrics, carried if outputs.state is None else outputs.state)

    return loss


def count_targets(batch: Batch) -> jax.Array:
    """int32[]. The targets that are not -1."""
    return (batch["targets"] >= 0).sum(dtype=jnp.int32)


def summed_cross_entropy(logits: jax.Array, batch: Batch, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """(sum, count) over the targets that are not -1."""
    counted = batch["targets"] >= 0
    nll = tensor.cross_entropy(logits, jnp.where(counted, batch["targets"], 0), vocab_size)
    return jnp.where(counted, nll, jnp.zeros_like(nll)).sum(), counted.sum(dtype=jnp.int32)
