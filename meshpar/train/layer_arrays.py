"""Stores each layer in arrays of its own between steps, where a model stacks its layers.

XLA:CPU copies every layer that a step without a loop reads from a stack, and every gradient that it writes to one. So
on CPUs a state has no stacks between such steps. Checkpoints, evaluations and exports have stacks: a state is cut after
it is restored, and stacked before it is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.sharding.resolve import Placement
from meshpar.train.layer_order import LAYERS
from meshpar.train.state import StatePlacement, TrainState


@dataclass(frozen=True)
class LayerArrays:
    """Cuts the stacks of a state into layers, and stacks them again.

    Args:
      stacks: the placement of a state in the model's order.
      layers: the same with a list of arrays [1, ...], one per layer, for each stack.
    """

    stacks: StatePlacement
    layers: StatePlacement

    def to_step(self, state: TrainState) -> TrainState:
        """The state with arrays for each layer. A state with stacks is donated.

        Communication: none. Memory: a second copy of one stack at a time.
        """
        if state.is_prepared:
            return state
        params = jax.tree.map(_cut, state.params, self.layers.params)
        opt_state = jax.tree.map(_cut, state.opt_state, self.layers.opt_state)
        return replace(state, params=params, opt_state=opt_state, is_prepared=True)

    def to_model(self, state: TrainState) -> TrainState:
        """The state with stacks. A state with arrays for each layer is donated.

        Communication and memory: as `to_step`.
        """
        if not state.is_prepared:
            return state
        params = jax.tree.map(_stack, self.stacks.params, state.params)
        opt_state = jax.tree.map(_stack, self.stacks.opt_state, state.opt_state)
        return replace(state, params=params, opt_state=opt_state, is_prepared=False)

    def gradients(self, grads: Any) -> Any:
        """The gradients of a step, in stacks. The gradients of the layers are donated."""
        return jax.tree.map(_stack, self.stacks.trained, grads)


def has_stacks(specs: Any) -> bool:
    """Whether a tree of `ArraySpec` has stacks [layers, ...]."""
    return any(spec.dims[:1] == (LAYERS,) and spec.shape[0] > 1 for spec in jax.tree.leaves(specs))


def cut_specs(specs: Any) -> Any:
    """A tree of `ArraySpec` with a list of specs [1, ...], one per layer, for each stack [layers, ...]."""

    def one(spec: Any) -> Any:
        if spec.dims[:1] != (LAYERS,):
            return spec
        return [replace(spec, shape=(1, *spec.shape[1:]))] * spec.shape[0]

    return jax.tree.map(one, specs)


def with_stacks(loss: Callable[..., Any], specs: Any) -> Callable[..., Any]:
    """Wraps a loss for parameters in lists. XLA removes the stacks, because the loss reads each layer alone.

    Args:
      loss: (params, ...) -> a result, of parameters in stacks.
      specs: tree of `ArraySpec`, of parameters in stacks.
    """

    def of_lists(params: Any, *rest: Any) -> Any:
        stacked = jax.tree.map(lambda _, x: jnp.concatenate(x) if isinstance(x, list) else x, specs, params)
        return loss(stacked, *rest)

    return of_lists


def _cut(stack: jax.Array, placed: Placement | list[Placement]) -> Any:
    if isinstance(placed, Placement):
        return stack
    layers = _cutting(placed[0], len(placed))(stack)
    stack.delete()
    return layers


def _stack(placed: Placement, layers: Any) -> jax.Array:
    if not isinstance(layers, list):
        return layers
    stack = _stacking(placed)(layers)
    for layer in layers:
        layer.delete()
    return stack


@cache
def _cutting(placement: Placement, num_layers: int) -> Callable[[jax.Array], list[jax.Array]]:
    return jax.jit(lambda stack: jnp.split(stack, num_layers), out_shardings=[placement.sharding] * num_layers)


@cache
def _stacking(placement: Placement) -> Callable[[list[jax.Array]], jax.Array]:
    return jax.jit(jnp.concatenate, out_shardings=placement.sharding)
