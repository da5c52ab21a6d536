"""Moves the layers of a train state between the model's order and the order of a pipeline's schedule.

With interleaved and V-shaped schedules a stage computes with other layers than those that it would store in the model's
order. So between steps each layer, with its optimizer state, is stored on the stage that computes with it. Checkpoints,
evaluations and exports have the model's order: a state is moved after it is restored, and before it is saved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
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


@dataclass(frozen=True)
class LayerOrder:
    """The moves between the two orders.

    Args:
      exchange: moves the layers that each stage stores to the stages that compute with them.
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

    def to_step(self, state: TrainState) -> TrainState:
        """The state in the schedule's order. A state in the model's order is donated.

        Communication: each layer and its optimizer state are sent to the stage that computes with it.
        Memory: a second copy of one array at a time.
        """
        return state if state.is_prepared else self._moved(state, in_schedule_order=True)

    def to_model(self, state: TrainState) -> TrainState:
        """The state in the model's order. A state in the schedule's order is donated. Communication: as `to_step`."""
        return self._moved(state, in_schedule_order=False) if state.is_prepared else state

    def gradients(self, grads: Any) -> Any:
        """The gradients of a step, in the model's order. They are donated."""
        return self.move(grads, self.placement.trained, in_schedule_order=False)

    def move(self, arrays: Any, placements: Any, in_schedule_order: bool) -> Any:
        """Moves the layers of a tree of arrays from one order to the other. Arrays with layers are donated."""

        def one(x: jax.Array, placement: Placement) -> jax.Array:
            if LAYERS not in placement.spec.dims:
                return x
            # On each device XLA:CPU runs the permutes of several arrays in any order, and hangs if there are too many.
            return self._compiled(x, placement, in_schedule_order).block_until_ready()

        return jax.tree.map(one, arrays, placements)

    def _moved(self, state: TrainState, in_schedule_order: bool) -> TrainState:
        placed = self.placement
        params = self.move(state.params, placed.params, in_schedule_order)
        opt_state = self.move(state.opt_state, placed.opt_state, in_schedule_order)
        carried = self.move(state.carried, placed.carried, in_schedule_order)
        return replace(state, params=params, opt_state=opt_state, carried=carried, is_prepared=in_schedule_order)

    @cached_property
    def _compiled(self) -> Any:
        """A program for each placement and direction."""
        return jax.jit(self._program, static_argnums=(1, 2), donate_argnums=0)

    def _program(self, x: jax.Array, placement: Placement, in_schedule_order: bool) -> jax.Array:
        move = self.exchange.forward if in_schedule_order else self.exchange.backward
        axes = self.ctx.stage_axes
        dim = placement.spec.dims.index(LAYERS)

        def local(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(move(jnp.moveaxis(x, dim, 0), axes, lax.axis_index(axes)), 0, dim)

        moved = on_shards(local, self.ctx, (placement.pspec,), placement.pspec)(on_device(x, placement))
        return moved if placement.memory_kind is None else jax.device_put(moved, placement.sharding)
