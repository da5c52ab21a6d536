"""Moves the layers of a train state between the model's order and the order of a pipeline's schedule.

Interleaved and V-shaped schedules compute on a stage with other layers than those that it stores in the model's order.
So between steps each layer, with all that the optimizer has of it, is stored on the stage that computes with it.
Checkpoints, evaluations and exports have the model's order: a state is moved after it is restored, and before it is
saved.
"""

from __future__ import annotations

from collections.abc import Callable
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
from meshpar.train.program import on_shards, shardings
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
        """Whether it is known of every array of the state where it has layers, so that all of them can be moved.

        An optimizer's array has the dims of its parameter, perhaps after others. Those of a factored average are found
        by their sizes, so its dim of this name may be another one. Error feedback may be flat.
        """
        whole = {placement.spec.dims for placement in jax.tree.leaves(self.placement.sharded)}

        def is_known(dims: tuple[str, ...]) -> bool:
            return ONE not in dims and (LAYERS not in dims or any(dims[start:] in whole for start in range(len(dims))))

        others = jax.tree.leaves((self.placement.opt_state, self.placement.carried))
        return all(is_known(placement.spec.dims) for placement in others)

    def to_schedule(self, state: TrainState) -> TrainState:
        """The state in the schedule's order. One in the model's order is donated.

        Communication: each layer and its optimizer state are sent to the stage that computes with it.
        """
        return state if state.in_schedule_order else self._to_schedule(state)

    def to_model(self, state: TrainState) -> TrainState:
        """The state in the model's order. One in the schedule's order is donated. Communication: as `to_schedule`."""
        return self._to_model(state) if state.in_schedule_order else state

    def moved(self, state: TrainState, in_schedule_order: bool) -> TrainState:
        """The state in the other order; within a program."""
        placed = self.placement
        arrays = state.params, state.opt_state, state.carried
        move = self.forward if in_schedule_order else self.backward
        params, opt_state, carried = move(arrays, (placed.params, placed.opt_state, placed.carried))
        return replace(state, params=params, opt_state=opt_state, carried=carried, in_schedule_order=in_schedule_order)

    def forward(self, arrays: Any, placements: Any) -> Any:
        """Moves arrays of any tree from the model's order to the schedule's; within a program."""
        return self._each(self.exchange.forward, arrays, placements)

    def backward(self, arrays: Any, placements: Any) -> Any:
        """Moves arrays of any tree from the schedule's order to the model's; within a program."""
        return self._each(self.exchange.backward, arrays, placements)

    def _each(self, move: Callable[..., Any], arrays: Any, placements: Any) -> Any:
        leaves, tree = jax.tree.flatten(on_device(arrays, placements))
        places = [place for place, placement in enumerate(jax.tree.leaves(placements)) if LAYERS in placement.spec.dims]
        layered = [jax.tree.leaves(placements)[place] for place in places]
        axes = self.ctx.stage_axes

        def local(xs: list[jax.Array]) -> list[jax.Array]:
            first = [jnp.moveaxis(x, _dim(placement), 0) for x, placement in zip(xs, layered, strict=True)]
            out = move(first, axes, lax.axis_index(axes))
            return [jnp.moveaxis(x, 0, _dim(placement)) for x, placement in zip(out, layered, strict=True)]

        pspecs = [placement.pspec for placement in layered]
        out = on_shards(local, self.ctx, (pspecs,), pspecs)([leaves[place] for place in places])
        for place, x in zip(places, out, strict=True):
            leaves[place] = x
        return jax.tree.unflatten(tree, leaves)

    @cached_property
    def _to_schedule(self) -> Callable[[TrainState], TrainState]:
        return self._program(in_schedule_order=True)

    @cached_property
    def _to_model(self) -> Callable[[TrainState], TrainState]:
        return self._program(in_schedule_order=False)

    def _program(self, in_schedule_order: bool) -> Callable[[TrainState], TrainState]:
        out = replace(shardings(self.placement.structs), in_schedule_order=in_schedule_order)

        def program(state: TrainState) -> TrainState:
            return self.moved(state, in_schedule_order)

        return jax.jit(program, out_shardings=out, donate_argnums=0)


def _dim(placement: Placement) -> int:
    return placement.spec.dims.index(LAYERS)
