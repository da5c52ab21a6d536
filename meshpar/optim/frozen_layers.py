"""Freezing layers of stacks: rows of parameters [layers, ...] that are never trained.

The gradients of these rows are zero, so that no norm includes them. The optimizer gets the other rows alone: it has no
state of frozen layers, and its updates of them are zero, which changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar.errors import ConfigError, Problems, suggestion
from meshpar.optim.freeze import Freeze
from meshpar.parallel.trainable import as_in
from meshpar.tree import flatten_with_paths, map_with_path, matching

LAYERS = "layers"


@dataclass(frozen=True)
class Rows:
    """Which rows of a parameter are frozen; `()` if none is. A leaf of a tree like the parameters.

    >>> rows = Rows((True, False, False, True))
    >>> rows.trained(jnp.arange(4)).tolist(), rows.whole(jnp.array([5, 6])).tolist()
    ([1, 2], [0, 5, 6, 0])
    """

    frozen: tuple[bool, ...] = ()

    def trained(self, x: jax.Array) -> jax.Array:
        """The rows that are trained."""
        return jnp.concatenate([x[begin:end] for begin, end, is_frozen in self._spans if not is_frozen]) if self else x

    def whole(self, updates: jax.Array) -> jax.Array:
        """The updates of all rows, from those of the trained ones; of the others -0.0, which changes no bit."""
        if not self:
            return updates
        parts, used = [], 0
        for begin, end, is_frozen in self._spans:
            if is_frozen:
                parts.append(-jnp.zeros((end - begin, *updates.shape[1:]), updates.dtype))
            else:
                parts.append(updates[used : used + end - begin])
                used += end - begin
        return jnp.concatenate(parts)

    def without_frozen(self, grad: jax.Array) -> jax.Array:
        """The gradient, with zeros in the frozen rows."""
        if not self:
            return grad
        frozen = np.asarray(self.frozen).reshape(-1, *[1] * (grad.ndim - 1))
        return jnp.where(frozen, jnp.zeros_like(grad), grad)

    def __bool__(self) -> bool:
        return any(self.frozen)

    @property
    def _spans(self) -> list[tuple[int, int, bool]]:
        """(begin, end, whether they are frozen) of consecutive rows."""
        spans, begin = [], 0
        for is_frozen, group in groupby(self.frozen):
            end = begin + len(list(group))
            spans.append((begin, end, is_frozen))
            begin = end
        return spans


def frozen_rows(freeze: Sequence[Freeze], specs: Any) -> Any:
    """Which rows of each parameter the entries with `layers` freeze: a tree of `Rows`; None without such entries.

    Args:
      specs: tree of `ArraySpec`.

    Raises:
      ConfigError: a glob matches no stack of layers, the layers are in several stacks, or an entry freezes all of them
        or none.
    """
    entries = [(i, entry) for i, entry in enumerate(freeze) if entry.layers is not None]
    if not entries:
        return None
    problems = Problems()
    stacks = {path: spec.shape[0] for path, spec in flatten_with_paths(specs).items() if spec.dims[:1] == (LAYERS,)}
    rows = {path: np.zeros(size, bool) for path, size in stacks.items()}
    if len(set(stacks.values())) > 1 or len({path.partition(".")[0] for path in stacks}) > 1:
        what = f"the layers are in several stacks: {', '.join(sorted({path.partition('.')[0] for path in stacks}))}"
        problems.add("freeze", what, "freeze whole stacks by their paths")
    for i, entry in entries:
        where = f"freeze.{i}.layers"
        if entry.until is not None:
            problems.add(f"freeze.{i}.until", "layers are frozen for the whole run", "leave out until, or layers")
        for glob in entry.paths:
            found = matching(stacks, glob)
            if not found:
                what = f"no parameter that matches {glob!r} has a dim `{LAYERS}`, which stacks layers"
                fix = suggestion(glob, stacks, "name the layer in the path: layers.0.**")
                problems.add(f"freeze.{i}.paths", what, fix)
            for path in found:
                chosen = np.arange(stacks[path])[entry.rows]
                if len(chosen) in (0, stacks[path]):
                    some = "none" if len(chosen) == 0 else "all"
                    what = f"{entry.layers!r} are {some} of the {stacks[path]} layers of {path}"
                    problems.add(where, what, "other layers; or leave layers out to freeze all")
                    break
                rows[path][chosen] = True
    for path, frozen in rows.items():
        if frozen.all():
            problems.add("freeze", f"its entries together freeze all layers of {path}", "freeze it by its path alone")
    problems.raise_any(ConfigError, "freeze does not fit the model:")
    return map_with_path(lambda path, _: Rows(tuple(rows[path].tolist()) if path in rows else ()), specs)


def check_frozen_rows(rows: Any, layer_axes: Sequence[str], prunes: bool) -> None:
    """Refuses what needs whole stacks.

    Args:
      layer_axes: over which layers or stages are sharded.

    Raises:
      ConfigError: layers are frozen, and their stacks are sharded or pruned.
    """
    problems = Problems()
    if rows and layer_axes:
        what = "the trained layers alone, and the optimizer's state of them, cannot be spread evenly over"
        fix = "freeze whole stacks by their paths, or no pipeline"
        problems.add("freeze.layers", f"{what} {' x '.join(layer_axes)}, as the layers are", fix)
    if rows and prunes:
        problems.add("freeze.layers", "pruning sets weights of whole stacks to zero", "no prune, or no freeze.layers")
    problems.raise_any(ConfigError, "freeze does not fit the run:")


def without_frozen_rows(grads: Any, rows: Any) -> Any:
    """The gradients, with zeros in frozen rows.

    Args:
      rows: see `frozen_rows`; also of parameters that are not trained.
    """
    return grads if rows is None else jax.tree.map(lambda grad, of: of.without_frozen(grad), grads, as_in(grads, rows))


def on_trained_rows(tx: optax.GradientTransformation, rows: Any) -> optax.GradientTransformation:
    """Wraps an optimizer so that it sees the rows that are trained alone.

    Memory: no state of the others.

    Args:
      rows: see `without_frozen_rows`.
    """
    if rows is None:
        return tx
    inner = optax.with_extra_args_support(tx)

    def trained(tree: Any) -> Any:
        return jax.tree.map(lambda x, of: of.trained(x), tree, as_in(tree, rows))

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        given = None if params is None else trained(params)
        updates, state = inner.update(trained(grads), state, given, **extra)
        return jax.tree.map(lambda x, of: of.whole(x), updates, as_in(updates, rows)), state

    return optax.GradientTransformationExtraArgs(lambda params: tx.init(trained(params)), update)  # pyright: ignore
