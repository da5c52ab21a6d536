"""Freezing: parameters that are never trained, or only trained after a number of steps.

A parameter that is never trained is not in the trees that the optimizer gets, see `parallel.trainable`. So it has no
gradient and no optimizer state, and no reduction includes it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
import pydantic

from meshpar.config import Coerced, Config, Positive
from meshpar.errors import ConfigError, Problems, suggestion
from meshpar.parallel.trainable import as_in, without
from meshpar.tree import flatten_with_paths, map_with_path, matching


class Freeze(Config):
    """Parameters that are frozen. A bare glob freezes for the whole run.

    The gradient of a frozen parameter is excluded from the global norm and from the optimizer's moments. When the
    parameter thaws, its moments start from zero, at the learning rate of that step.

    >>> params = {"embedding": 0, "blocks": {"attn": 0, "mlp": 0}}
    >>> frozen_until([Freeze(paths="blocks.*", until=100)], params, num_steps=1000)
    {'blocks': {'attn': 100, 'mlp': 100}, 'embedding': 0.0}
    """

    shorthand: ClassVar = "paths"
    paths: Coerced[tuple[str, ...], list[str] | str]
    """Globs over parameter paths: `*` matches between dots, `**` anything."""
    layers: str | None = None
    """The frozen layers of a stack, as a slice: `0:8`, `:-4`. Then only layers are frozen, by default all their
    parameters. Default: all layers."""
    until: Positive | None = None
    """Steps for which the parameters are frozen. Default: the whole run."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _of_all_stacks(cls, data: Any) -> Any:
        return {"paths": "**"} | data if isinstance(data, dict) and data.get("layers") is not None else data

    @pydantic.field_validator("layers")
    @classmethod
    def _is_slice(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"(-?\d{1,9})?:(-?\d{1,9})?", value):
            raise ValueError("must be a slice, such as 0:8, 8: or :-4")
        return value

    @property
    def rows(self) -> slice:
        """The layers as a slice of a stack."""
        return slice(*(int(part) if part else None for part in (self.layers or ":").split(":")))


def frozen_until(freeze: Sequence[Freeze], params: Any, num_steps: int) -> Any:
    """For how many steps each parameter is frozen: 0 if it is not, infinity if it is never trained.

    If several entries match a parameter, the longest time counts.

    Args:
      params: any tree; its leaves are not read.

    Raises:
      ConfigError: a glob matches no parameter, an `until` is not within the run, or all parameters are frozen.
    """
    problems = Problems()
    steps = dict.fromkeys(flatten_with_paths(params), 0.0)
    for i, entry in enumerate(freeze):
        if entry.layers is not None:
            continue  # see `frozen_layers`
        length = math.inf if entry.until is None else entry.until
        if entry.until is not None and entry.until >= num_steps:
            what = f"{entry.until} is not below num_steps = {num_steps}: the parameters would never be trained"
            problems.add(f"freeze.{i}.until", what, "leave it out to freeze them for the whole run")
        for glob in entry.paths:
            found = matching(steps, glob)
            if not found:
                fix = suggestion(glob, steps, "`meshpar explain` lists them")
                problems.add(f"freeze.{i}.paths", f"no parameter matches {glob!r}", fix)
            steps |= {path: max(steps[path], length) for path in found}
    if steps and all(length == math.inf for length in steps.values()):
        problems.add("freeze", "every parameter is frozen for the whole run", "leave at least one to train")
    problems.raise_any(ConfigError, "freeze does not fit the model:")
    return map_with_path(lambda path, _: steps[path], params)


def for_good(until: Any) -> frozenset[str]:
    """The paths of the parameters that are never trained.

    >>> for_good({"table": math.inf, "head": 0, "body": 100})
    frozenset({'table'})
    """
    return frozenset(path for path, length in flatten_with_paths(until).items() if length == math.inf)


def thawing(until: Any) -> Any:
    """For how many steps each parameter is frozen, without those that are never trained; None if none thaws."""
    trained = without(until, for_good(until)) if until else None
    return trained if any(jax.tree.leaves(trained)) else None


def thawed(grads: Any, until: Any, step: jax.Array) -> Any:
    """The gradients at a step: zeros for parameters that are frozen until a later step.

    Args:
      grads: tree like the parameters, with or without parameters that are never trained.
      until: see `frozen_until`; None if nothing is frozen.
    """
    if until is None:
        return grads

    def one(grad: jax.Array, until: float) -> jax.Array:
        return jnp.where(step < int(until), jnp.zeros_like(grad), grad) if until else grad

    return jax.tree.map(one, grads, as_in(grads, until))


def starting_at(first: int, tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps a transformation so that before step `first` its updates are zero and its state does not change."""
    inner = optax.with_extra_args_support(tx)
    if first == 0:
        return inner

    def update(grads: Any, state: Any, params: Any = None, *, step: jax.Array, **extra: Any) -> tuple[Any, Any]:
        updates, new = inner.update(grads, state, params, step=step, **extra)
        updates = jax.tree.map(lambda u: jnp.where(step < first, jnp.zeros_like(u), u), updates)
        return updates, jax.tree.map(lambda new, old: jnp.where(step < first, old, new), new, state)

    return optax.GradientTransformationExtraArgs(tx.init, update)  # pyright: ignore
