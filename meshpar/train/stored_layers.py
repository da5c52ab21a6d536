"""Stores the layers of a train state between steps as the step needs them, where that is not the model's form.

`LayerOrder`, on every platform: with interleaved and V-shaped schedules a stage computes with other layers than those
that it would store in the model's order. Between steps each layer is stored on the stage that computes with it.

`LayerArrays`, on CPUs: XLA:CPU copies every layer that a step without a loop reads from a stack, and every gradient
that it writes to one. Between such steps a state has an array for each layer, and no stacks.

Checkpoints, evaluations and exports have the model's form: a state is converted after it is restored, and before it is
saved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.parallel.context import ParallelContext
from meshpar.parallel.pipeline.exchange import Exchange
from meshpar.sharding.resolve import Placement
from meshpar.train.error_feedback import ONE
from meshpar.train.program import on_shards
from meshpar.train.state import StatePlacement, TrainState, on_device

LAYERS = "layers"
Part = Callable[[StatePlacement], Any]


class StoredLayers(ABC):
    """Converts a state to the form that a step needs, and back."""

    def to_step(self, state: TrainState) -> TrainState:
        """The state as the step needs it. A state in the model's form is donated."""
        return state if state.is_prepared else self._moved(state, True)

    def to_model(self, state: TrainState) -> TrainState:
        """The state in the model's form. A state as the step needs it is donated."""
        return self._moved(state, False) if state.is_prepared else state

    def gradients(self, grads: Any) -> Any:
        """The gradients of a step, in the model's form. They are donated."""
        return self.move(grads, attrgetter("trained"), False)

    def _moved(self, state: TrainState, to_step: bool) -> TrainState:
        def moved(name: str) -> Any:
            return self.move(getattr(state, name), attrgetter(name), to_step)

        parts = {name: moved(name) for name in ("params", "opt_state", "carried")}
        return replace(state, **parts, is_prepared=to_step)

    @abstractmethod
    def move(self, arrays: Any, part: Part, to_step: bool) -> Any:
        """Converts a tree of arrays, which belong to a part of a placement. Arrays with layers are donated."""


@dataclass(frozen=True)
class LayerOrder(StoredLayers):
    """Moves layers between the model's order and the order of a pipeline's schedule.

    Args:
      exchange: moves the layers that each stage stores to the stages that compute with them.

    Communication: each layer and its optimizer state are sent to the stage that computes with it, or back.
    Memory: a second copy of one array at a time.
    """

    exchange: Exchange
    ctx: ParallelContext
    placement: StatePlacement

    @property
    def covers_state(self) -> bool:
        """Whether the position of the layers is known in every array of the state, so that all can be moved.

        An optimizer's array has the dims of its parameter, perhaps after other dims. The dims of a factored average are
        found by size, so its layers are known only if no other dim has their size. Error feedback may be flat.
        """
        specs = [placement.spec for placement in jax.tree.leaves(self.placement.sharded)]
        layered = [spec for spec in specs if LAYERS in spec.dims]
        whole = {spec.dims for spec in layered}
        is_unique = all(spec.shape.count(spec.shape[spec.dims.index(LAYERS)]) == 1 for spec in layered)

        def is_known(dims: tuple[str, ...]) -> bool:
            is_whole = any(dims[start:] in whole for start in range(len(dims)))
            return ONE not in dims and (LAYERS not in dims or is_whole or is_unique)

        others = jax.tree.leaves((self.placement.opt_state, self.placement.carried))
        return all(is_known(placement.spec.dims) for placement in others)

    def move(self, arrays: Any, part: Part, to_step: bool) -> Any:
        def one(x: jax.Array, placement: Placement) -> jax.Array:
            if LAYERS not in placement.spec.dims:
                return x
            # On each device XLA:CPU runs the permutes of several arrays in any order, and hangs if there are too many.
            return self._compiled(x, placement, to_step).block_until_ready()

        return jax.tree.map(one, arrays, part(self.placement))

    @cached_property
    def _compiled(self) -> Any:
        """A program for each placement and direction."""
        return jax.jit(self._program, static_argnums=(1, 2), donate_argnums=0)

    def _program(self, x: jax.Array, placement: Placement, to_step: bool) -> jax.Array:
        move = self.exchange.forward if to_step else self.exchange.backward
        axes = self.ctx.stage_axes
        dim = placement.spec.dims.index(LAYERS)

        def local(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(move(jnp.moveaxis(x, dim, 0), axes, lax.axis_index(axes)), 0, dim)

        moved = on_shards(local, self.ctx, (placement.pspec,), placement.pspec)(on_device(x, placement))
        return moved if placement.memory_kind is None else jax.device_put(moved, placement.sharding)


@dataclass(frozen=True)
class LayerArrays(StoredLayers):
    """Cuts the stacks of a state into layers, and stacks them again.

    Args:
      stacks: the placement of a state in the model's form.
      layers: the same with a list of arrays [1, ...], one per layer, for each stack.

    Communication: none. Memory: a second copy of one stack at a time.
    """

    stacks: StatePlacement
    layers: StatePlacement

    def move(self, arrays: Any, part: Part, to_step: bool) -> Any:
        if to_step:
            return jax.tree.map(_cut, arrays, part(self.layers))
        return jax.tree.map(_stack, part(self.stacks), arrays)


def has_stacks(specs: Any) -> bool:
    """Whether a tree of `ArraySpec` has stacks [layers, ...]."""
    return any(spec.dims[:1] == (LAYERS,) and spec.shape[0] > 1 for spec in jax.tree.leaves(specs))


def cut_loss(loss: Callable[..., Any], specs: Any) -> tuple[Callable[..., Any], Any]:
    """A loss of parameters without stacks, and their specs: for each stack a list of [1, ...], one per layer.

    XLA removes the stacks that the new loss makes, because the loss reads each layer alone.

    Args:
      loss: (params, ...) -> a result, of parameters in stacks.
      specs: tree of `ArraySpec`, of parameters in stacks.
    """

    def cut(spec: Any) -> Any:
        if spec.dims[:1] != (LAYERS,):
            return spec
        return [replace(spec, shape=(1, *spec.shape[1:]))] * spec.shape[0]

    def of_lists(params: Any, *rest: Any) -> Any:
        stacked = jax.tree.map(lambda _, x: jnp.concatenate(x) if isinstance(x, list) else x, specs, params)
        return loss(stacked, *rest)

    return of_lists, jax.tree.map(cut, specs)


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
