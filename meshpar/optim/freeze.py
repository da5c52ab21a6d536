"""Parameters that are not trained: for good, or until a step."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax import lax
from optax import MaskedNode

from meshpar.config import Config, Positive
from meshpar.errors import ConfigError, Problems, nearest
from meshpar.tree import flatten_with_paths, map_with_path, matching


class Freeze(Config):
    """Which parameters keep their values, and how long. In a config a bare glob is one that is frozen for good.

    A frozen parameter has no gradient: it counts neither in the gradient's norm nor in the optimizer's moments. When
    it thaws, the optimizer begins with it as with a new one, at the learning rate of that step.
    """

    shorthand: ClassVar = "paths"
    paths: tuple[str, ...]
    """Globs: `*` stands for what is between dots, `**` for anything. The layers of a stack are one parameter."""
    until: Positive | None = None
    """How many steps of the run they are frozen. Default: all."""


def frozen_until(freeze: Sequence[Freeze], params: Any, num_steps: int) -> Any:
    """How many steps each parameter is frozen: 0 for not at all, infinity for good; the longest that any entry says.

    Args:
      params: any tree; its leaves are not read.

    Raises:
      ConfigError: lists every glob that matches no parameter and every `until` at which nothing thaws; or all
        parameters are frozen for good.
    """
    problems, steps = Problems(), dict.fromkeys(flatten_with_paths(params), 0.0)
    for i, entry in enumerate(freeze):
        length = math.inf if entry.until is None else entry.until
        if entry.until is not None and entry.until >= num_steps:
            what = f"{entry.until} is not below num_steps = {num_steps}: these would never be trained"
            problems.add(f"freeze.{i}.until", what, "leave it out to freeze them for good")
        for glob in entry.paths:
            found = matching(steps, glob)
            if not found:
                near = nearest(glob, steps)
                fix = f"did you mean {near}?" if near else "`meshpar explain` lists them"
                problems.add(f"freeze.{i}.paths", f"no parameter matches {glob!r}", fix)
            steps |= {path: max(steps[path], length) for path in found}
    if steps and all(length == math.inf for length in steps.values()):
        problems.add("freeze", "every parameter is frozen for good", "leave one to train")
    problems.raise_any(ConfigError, "what is frozen does not fit the model:")
    return map_with_path(lambda path, _: steps[path], params)


def for_good(until: Any) -> frozenset[str]:
    """The paths of what is never trained: it has no gradient, no optimizer state, and is in no reduction.

    >>> for_good({"table": math.inf, "head": 0, "body": 100})
    frozenset({'table'})
    """
    return frozenset(path for path, length in flatten_with_paths(until).items() if length == math.inf)


def thawed(params: Any, until: Any, step: jax.Array) -> Any:
    """The parameters as the loss may differentiate them at a step: of those that are frozen there is no gradient.

    Args:
      until: as of `frozen_until`; None where nothing is frozen.
    """
    if until is None:
        return params

    def one(x: jax.Array, until: float) -> jax.Array:
        if until in (0, math.inf):
            return lax.stop_gradient(x) if until else x
        return jnp.where(step < int(until), lax.stop_gradient(x), x)

    return jax.tree.map(one, params, until)


def keeping(until: Any) -> optax.GradientTransformationExtraArgs:
    """Makes the updates of frozen parameters zero: the last of a chain, for weight decay is no gradient."""

    def update(updates: Any, state: Any, params: Any = None, *, step: jax.Array, **_: Any) -> tuple[Any, Any]:
        keep = lambda u, length: jnp.where(step < _count(length), jnp.zeros_like(u), u) if length else u
        return jax.tree.map(keep, updates, until), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)  # pyright: ignore


def beginning(tx: optax.GradientTransformation, at: float) -> optax.GradientTransformationExtraArgs:
    """An optimizer that sees nothing before step `at`, and begins there; with infinity, none at all."""
    if at == math.inf:
        return optax.with_extra_args_support(optax.set_to_zero())
    inner = optax.with_extra_args_support(tx)

    def update(grads: Any, state: Any, params: Any = None, *, step: jax.Array, **extra: Any) -> tuple[Any, Any]:
        updates, new = inner.update(grads, state, params, step=step, **extra)
        frozen = step < int(at)
        return updates, jax.tree.map(lambda new, old: jnp.where(frozen, old, new), new, state)

    return optax.GradientTransformationExtraArgs(tx.init, update)  # pyright: ignore


def _count(length: float) -> int:
    return jnp.iinfo(jnp.int32).max if length == math.inf else int(length)


def without(tree: Any, frozen: Collection[str]) -> Any:
    """The tree without the leaves of these paths.

    >>> without({"table": 1, "head": 2}, {"table"})
    {'head': 2, 'table': MaskedNode()}
    """
    return map_with_path(lambda path, leaf: MaskedNode() if path in frozen else leaf, tree) if frozen else tree


def as_in(trained: Any, whole: Any) -> Any:
    """The leaves of `whole` that `trained` has too."""
    return jax.tree.map(lambda one, leaf: one if _is_masked(one) else leaf, trained, whole, is_leaf=_is_masked)


def filled(trained: Any, whole: Any) -> Any:
    """`trained`, with the leaves of `whole` in its gaps.

    >>> filled({"head": 5, "table": MaskedNode()}, {"head": 2, "table": 1})
    {'head': 5, 'table': 1}
    """
    return jax.tree.map(lambda one, leaf: leaf if _is_masked(one) else one, trained, whole, is_leaf=_is_masked)


def _is_masked(x: Any) -> bool:
    return isinstance(x, MaskedNode)
