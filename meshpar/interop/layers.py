"""Marks the layers of a user's model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.errors import ConfigError


def layers(blocks: Sequence[Any], x: Any, apply: Callable[[Any, Any], Any] | None = None) -> Any:
    """Computes `x = apply(block, x)` for one block after the other, in one loop over their stacked parameters.

    A pipeline cuts between these blocks, also where it would not find them equal: their parameters have no numbers in
    their paths, or something else is computed between them. The parameters stay as they are.

    Args:
      blocks: NNX modules, or trees of parameters, of one structure and with the same shapes.
      x: the input of the first block: an array, or a tree of arrays. Each block returns the same types.
      apply: (block, x) -> the output of a block. Default: `block(x)`.

    Raises:
      ConfigError: blocks differ.

    >>> weights = [{"w": jnp.full(2, 2.0)}, {"w": jnp.full(2, 3.0)}]
    >>> layers(weights, jnp.ones(2), lambda block, x: x * block["w"]).tolist()
    [6.0, 6.0]
    """
    apply = apply or (lambda block, x: block(x))
    if not blocks:
        return x
    if not isinstance(blocks[0], nnx.Module):
        return _scanned(list(blocks), x, apply)
    graphs, states = zip(*(nnx.split(block) for block in blocks), strict=True)
    if any(graph != graphs[0] for graph in graphs):
        number = next(i for i, graph in enumerate(graphs) if graph != graphs[0])
        raise ConfigError(f"layers: block {number} has another structure than block 0; mark each run of equal blocks")

    def of_module(state: Any, x: Any) -> Any:
        block = nnx.merge(graphs[0], state)
        return apply(block, x), nnx.state(block, nnx.Not(nnx.Param))

    return _scanned_modules(blocks, states, x, of_module)


def _scanned_modules(blocks: Sequence[Any], states: Sequence[Any], x: Any, of_module: Callable[..., Any]) -> Any:
    x, changed = jax.lax.scan(lambda x, state: of_module(state, x), x, _stacked(states))
    for i, block in enumerate(blocks):
        nnx.update(block, jax.tree.map(itemgetter(i), changed))
    return x


def _scanned(blocks: Sequence[Any], x: Any, apply: Callable[[Any, Any], Any]) -> Any:
    return jax.lax.scan(lambda x, block: (apply(block, x), None), x, _stacked(blocks))[0]


def _stacked(trees: Sequence[Any]) -> Any:
    """One tree with a row for each of these, which have the same structure and shapes."""
    forms = [(jax.tree.structure(tree), [(jnp.shape(a), a.dtype) for a in jax.tree.leaves(tree)]) for tree in trees]
    for number, form in enumerate(forms):
        if form != forms[0]:
            what = "parameters of other names" if form[0] != forms[0][0] else "parameters of other shapes"
            raise ConfigError(f"layers: block {number} has {what} than block 0; mark each run of equal blocks")
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *trees)
