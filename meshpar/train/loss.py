"""Losses as sums and counts, so that means are computed over the tokens of all devices."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pydantic

from meshpar.config import Coerced, Config, FilePath, Positive, Target, default
from meshpar.errors import ConfigError, Problems
from meshpar.parallel.batch import TEACHER, TEACHER_HEAD, Batch, split_off_shared
from meshpar.parallel.data import partial_sum
from meshpar.parallel.outputs import OutputProjection, Outputs, logits_of
from meshpar.sharding.rules import AxisRules
from meshpar.train import token_loss
from meshpar.train.chunks import Chunk
from meshpar.train.projected import summed_over_logits
from meshpar.tree import flatten_with_paths, map_with_path

MASKS = re.compile("mask|weight|valid|padding|segments", re.IGNORECASE)
"""Matches names of arrays that select the rows or tokens that count."""

RECORDED = (
    "kind", "step", "loss", "grad_norm", "tokens", "skipped", "lr", "step_s", "tokens_per_s", "rows_per_s",
    "data_wait", "mfu",
)  # fmt: skip
"""The names of the values that a step and its record report themselves: no metric may have one of them."""


@dataclass(frozen=True)
class LossSums:
    """The result of a loss on its local rows, as sums: the step divides them by the count of all devices.

    Args:
      loss: float[]. The sum of the losses.
      count: int32[]. The number of tokens, rows or pixels summed. Or float[], the sum of their weights.
      metrics: name -> float[]. Other sums over the same, reported as means.
      carried: the carried state for the next step, such as batch statistics.

    >>> def loss(params, batch, key):
    ...     errors = jnp.square(params["w"] * batch["x"] - batch["y"]) * batch["mask"]
    ...     return LossSums(errors.sum(), batch["mask"].sum())
    >>> batch = {"x": jnp.ones(3), "y": jnp.zeros(3), "mask": jnp.array([1.0, 1.0, 0.0])}
    >>> sums = loss({"w": jnp.array(2.0)}, batch, None)
    >>> float(sums.loss), float(sums.count)
    (8.0, 2.0)
    """

    loss: jax.Array
    count: jax.Array
    metrics: dict[str, jax.Array] = field(default_factory=dict)
    carried: Any = field(default_factory=dict)

    @property
    def sums(self) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """The values that are summed over microbatches and devices."""
        return self.loss, self.count, self.metrics


jax.tree_util.register_dataclass(LossSums, ["loss", "count", "metrics", "carried"], [])

Each = Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]
"""(logits, targets, logits of a teacher or None) -> [batch, seq], the loss of each token."""
Loss = Callable[[Any, Batch, jax.Array | None, Any], LossSums]
"""(params, batch, key, carried) -> `LossSums` of the local rows."""


def of_shards(loss: Loss) -> Loss:
    """A loss for local shards: its results are sums over one device's tokens, also where their types are the same."""

    def of_device(params: Any, batch: Batch, key: jax.Array | None, carried: Any) -> LossSums:
        found = loss(params, batch, key, carried)
        total, count, metrics = partial_sum(found.sums)
        return replace(found, loss=total, count=count, metrics=metrics)

    return of_device


def as_loss_sums(found: Any, rows: jax.Array, carried: Any, must_carry: bool) -> LossSums:
    """Converts the result of a user's loss, means over the rows or a `LossSums`, to sums.

    Args:
      found: a mean; (mean, metrics); (mean, metrics, carried); or a `LossSums`.
      carried: the carried state that the loss got; an empty dict if there is none.
      must_carry: whether the loss has to return its carried state, if there is any.

    Raises:
      ConfigError: `found` has none of these forms; or its carried state is missing, or has a new structure.
    """
    must_carry = must_carry and bool(jax.tree.leaves(carried))
    sums = found if isinstance(found, LossSums) else _of_means(found, rows, carried, must_carry)
    problems = Problems()
    scalars = {"the loss": sums.loss, "the count": sums.count}
    for name, x in (scalars | {f"metrics[{name!r}]": x for name, x in sums.metrics.items()}).items():
        if jnp.shape(x):
            problems.add(name, f"has the shape {list(jnp.shape(x))}, and has to be one number", "x.mean(), or x.sum()")
    if not jnp.issubdtype(jnp.result_type(sums.loss), jnp.floating):
        problems.add("the loss", f"is {jnp.result_type(sums.loss)}, which has no gradient", "a floating-point number")
    if must_carry:
        _check_carried(sums.carried, carried, problems)
    problems.raise_any(ConfigError, "the result of the loss cannot be trained on:")
    weighted = jnp.issubdtype(jnp.result_type(sums.count), jnp.floating)
    count = sums.count if weighted else jnp.asarray(sums.count, jnp.int32)
    after = flatten_with_paths(sums.carried) if must_carry else {}
    return replace(sums, count=count, carried=map_with_path(lambda path, x: after.get(path, x), carried))


def check_names(metrics: Mapping[str, Any]) -> None:
    """Raises ConfigError if a loss or a layer returns a metric with a name that a step's record uses itself."""
    problems = Problems()
    for name in metrics:
        if name in RECORDED:
            problems.add(f"metrics[{name!r}]", "a step records a value of its own under this name", "another name")
    problems.raise_any(ConfigError, "the loss or a layer returns metrics that cannot be recorded:")


def _of_means(found: Any, rows: jax.Array, carried: Any, must_carry: bool) -> LossSums:
    parts = list(found) if isinstance(found, tuple) else [found]
    metrics = parts[1] if len(parts) > 1 else {}
    numbers = [parts[0] if parts else None, *(metrics.values() if isinstance(metrics, Mapping) else [None])]
    if len(parts) > 3 or not all(isinstance(x, (jax.Array, np.ndarray, np.generic, int, float)) for x in numbers):
        shown = ", ".join("array" if isinstance(part, jax.Array) else type(part).__name__ for part in parts)
        raise ConfigError(f"the loss returns ({shown}); return a mean, (mean, metrics), or (mean, metrics, carried)")
    if must_carry and len(parts) < 3:
        what = f"the loss gets {', '.join(map(str, carried))} as carried state, and does not return its new value"
        fix = "return (mean, metrics, carried); for an NNX model, carried is nnx.state(model, nnx.Not(nnx.Param))"
        raise ConfigError(f"{what}; {fix}")
    num_rows = jnp.ones_like(rows).sum(dtype=jnp.int32)

    def total(x: Any) -> jax.Array:
        return x * num_rows.astype(jnp.result_type(x))

    new = parts[2] if len(parts) > 2 else carried
    return LossSums(total(parts[0]), num_rows, {name: total(x) for name, x in metrics.items()}, new)


def _check_carried(new: Any, given: Any, problems: Problems) -> None:
    """Reports each array of the carried state that a loss drops, adds, or returns with another shape or dtype."""
    after = flatten_with_paths(new)
    before = flatten_with_paths(given)
    for path in (path for path in before if path not in after):
        problems.add(f"carried.{path}", "is not returned", "return the whole carried state")
    for path in (path for path in after if path not in before):
        problems.add(f"carried.{path}", "is not in the carried state so far", "add it to the first carried state")
    for path in (path for path in before if path in after):
        old = jax.typeof(before[path])
        x = jax.typeof(after[path])
        if (old.shape, old.dtype) != (x.shape, x.dtype):
            problems.add(f"carried.{path}", f"is {old.str_short()} before the step and {x.str_short()} after it")


def warn_of_masks(names: set[str], num_microbatches: int) -> None:
    """Warns that the mean of microbatches' means is not the mean over the batch, if the batch has a mask."""
    if masks := sorted(name for name in names if MASKS.search(name)):
        what = f"the loss returns a mean, and the batch has {', '.join(masks)}: if not all rows or tokens count, the"
        what += f" mean of {num_microbatches} microbatches' means is not the mean of the batch"
        warnings.warn(f"{what}; return meshpar.LossSums(sum, count), which is exact", UserWarning, stacklevel=2)


class Distill(Config):
    """Distillation: the model learns a teacher's distribution over the next token in addition to the text.

    The loss is `(1 - weight) * cross entropy + weight * temperature^2 * KL(teacher || model)`, where the
    temperature softens both distributions of the divergence.

    Source: Hinton et al. 2015, arXiv:1503.02531.
    """

    teacher: FilePath
    """The teacher's local run directory."""
    temperature: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] = 1.0
    """Divides the logits of both models in the divergence."""
    weight: Annotated[float, pydantic.Field(ge=0, le=1)] = 0.5
    """Weight of the divergence; that of the cross entropy is 1 minus this."""
    rules: Coerced[AxisRules | None, str | list[str] | dict[str, Any]] = default(None)
    """How the teacher's parameters are sharded. Default: by the run's rules."""

    def add(self, nll: jax.Array, logits: jax.Array, teacher: jax.Array, vocab_size: int) -> jax.Array:
        """The loss of each token, from its cross entropy and the logits of both models."""
        kl = token_loss.divergence(logits, teacher, vocab_size, self.temperature)
        return (1 - self.weight) * nll + self.weight * self.temperature**2 * kl


class LossConfig(Config):
    """The next token's cross entropy with optional terms, or a user's own loss.

    Evaluations leave the optional terms out, so that runs can be compared.
    """

    shorthand: ClassVar = "target"
    is_default_kind: ClassVar = True
    kind: Literal["next_token"] = "next_token"
    target: Target | None = None
    """The loss of an imported model, as `package.module:name`; see `interop.flax_model`."""
    label_smoothing: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.0
    """Fraction of the target's probability that is spread evenly over the vocabulary."""
    z_loss: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the squared logarithm of the softmax's denominator; 1e-4 keeps logits from drifting."""
    chunk: Literal["auto", "none"] | Positive = "auto"
    """Tokens whose logits a device holds at a time; `none` for all, `auto` for chunks if they need less memory."""

    @pydantic.field_validator("chunk", mode="before")
    @classmethod
    def _chunk(cls, chunk: Any) -> Any:
        if chunk not in ("auto", "none") and (type(chunk) is not int or not 0 < chunk < 2**31):
            raise ValueError(f"must be auto, none, or a number of tokens, got {chunk!r}")
        return chunk

    @pydantic.model_validator(mode="after")
    def _one_loss(self) -> LossConfig:
        if self.target and (self.label_smoothing or self.z_loss or self.chunk != "auto"):
            raise ValueError("label_smoothing, z_loss and chunk: in a target, pass them to meshpar.cross_entropy")
        return self

    def each(self, vocab_size: int, distill: Distill | None = None) -> Each:
        """The loss of each token: its cross entropy with the optional terms, and the divergence from a teacher."""

        def each(logits: jax.Array, targets: jax.Array, teacher: jax.Array | None) -> jax.Array:
            nll = token_loss.cross_entropy(logits, targets, vocab_size, self.label_smoothing, self.z_loss)
            return nll if distill is None or teacher is None else distill.add(nll, logits, teacher, vocab_size)

        return each

    def build(self, apply: Callable[..., jax.Array], vocab_size: int, distill: Distill | None = None) -> Loss:
        """The loss of a step; without any of these settings it is `next_token_loss(apply, vocab_size)`."""
        return _summed(apply, self.each(vocab_size, distill), self.chunk, adds_auxiliary=True)


def next_token_loss(apply: Callable[..., Any], vocab_size: int, chunk: Chunk = "auto") -> Loss:
    """Cross entropy of `targets`, where targets of -1 do not count. The model's auxiliary losses are only reported.

    Args:
      apply: (params, batch, key) -> logits [batch, seq, vocab], local shards of the vocabulary; or `Outputs`.
      vocab_size: logits at or beyond it are padding.
    """
    return _summed(apply, LossConfig().each(vocab_size), chunk, adds_auxiliary=False)


def _summed(apply: Callable[..., Any], each: Each, chunk: Chunk, adds_auxiliary: bool) -> Loss:
    """A loss that sums the losses of the tokens, and with `adds_auxiliary` the model's auxiliary losses."""

    def loss(params: Any, batch: Batch, key: jax.Array | None, carried: Any) -> LossSums:
        outputs = apply(params, batch, key)
        if not isinstance(outputs, Outputs):
            outputs = Outputs(outputs)
        total, count = summed_over_tokens(outputs.projected, batch, each, chunk)
        if adds_auxiliary:
            total = outputs.plus_losses(total, count)
        return LossSums(total, count, outputs.sums(count), carried if outputs.state is None else outputs.state)

    return loss


def count_targets(batch: Batch) -> jax.Array:
    """int32[]. The number of targets that are not -1."""
    return (batch["targets"] >= 0).sum(dtype=jnp.int32)


def summed_over_tokens(
    projected: jax.Array | OutputProjection, batch: Batch, each: Each, chunk: Chunk = "auto"
) -> tuple[jax.Array, jax.Array]:
    """(sum, count) over the targets that are not -1."""

    def cost(logits: jax.Array, tokens: Batch, shared: Batch) -> jax.Array:
        counted = tokens["targets"] >= 0
        teacher = logits_of(tokens[TEACHER], shared[TEACHER_HEAD]) if shared else None
        costs = each(logits, jnp.where(counted, tokens["targets"], 0), teacher)
        return jnp.where(counted, costs, jnp.zeros_like(costs)).sum()

    rows, shared = split_off_shared(batch)
    tokens = {name: x for name, x in rows.items() if name in ("targets", TEACHER)}
    if isinstance(projected, OutputProjection):
        total = summed_over_logits(lambda axes: cost, projected.hidden, projected.head, tokens, shared, chunk)
        return total, count_targets(batch)
    return cost(projected, tokens, shared), count_targets(batch)
