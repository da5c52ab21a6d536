"""One program for every schedule: a scan over ticks, in each of which every stage reads from a table what it does.

A tick is three conditionals (F, B, W) of which a stage takes one at most, and two permutes: all that was made goes one
stage to the right and one to the left, and the table says who keeps what. What lasts longer than a tick lies in slots
that are updated in place: a conditional with two branches, one of which changes nothing, copies nothing; a switch over
three would copy every slot and every sum in every tick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.parallel.context import ParallelContext, manual
from meshpar.parallel.local import varying, varying_like, zeros_of
from meshpar.parallel.outputs import Auxiliary, Scalars
from meshpar.parallel.pipeline.exchange import Exchange, exchange
from meshpar.parallel.pipeline.model import Batch, PipelineModel
from meshpar.parallel.pipeline.partition import StagePartition, cut_layers
from meshpar.parallel.pipeline.schedule import Schedule
from meshpar.parallel.pipeline.schedule_table import KINDS, ScheduleTable, TableRow, tick_table
from meshpar.parallel.pipeline.simulate import check_complete
from meshpar.parallel.pipeline.split import Split, split
from meshpar.parallel.precision import summed_in, wide

Sums = tuple[jax.Array, jax.Array, Any]
Totals = tuple[jax.Array, jax.Array, Scalars]
"""Sums of losses, tokens and metrics, as a `LossSums` has them."""


@dataclass(frozen=True)
class Pipeline:
    """A model and its schedule."""

    parts: PipelineModel
    schedule: Schedule

    def gradients(self, params: Any, batch: Batch, key: jax.Array | None, sums: Any) -> tuple[Totals, Any]:
        """Totals and the sums of gradients of this device's rows, in the manual lowering.

        Args:
          params: what `parallel.data.gather_params` gives.
          batch: local rows, a multiple of the microbatches.
          sums: in which gradients are summed; None for float32 at least.

        Communication: two permutes of an activation in each tick, over the axis of the stages.
        Memory: what a layer keeps of a microbatch, for as many of them as the schedule holds.
        """
        return _Stage(self, params, batch, key).gradients(sums)

    def evaluation(self, params: Any, batch: Batch) -> Totals:
        """Totals without auxiliary losses: forwards alone, in the order in which the schedule has them."""
        return _Stage(self, params, batch, None, forward_only=True).evaluation()

    def plan(self, ctx: ParallelContext, forward_only: bool = False) -> tuple[ScheduleTable, StagePartition]:
        """The table, and which layers are where.

        Raises:
          ScheduleError: the schedule is not complete, or its stages wait for each other.
        """
        num_stages = ctx.shards("stage")
        orders = self.schedule.orders(num_stages)
        check_complete(orders, self.schedule)
        if forward_only:
            orders = [[op for op in order if op.kind == "F"] for order in orders]
        return tick_table(orders, self.schedule), self.cut(ctx)

    def cut(self, ctx: ParallelContext) -> StagePartition:
        return cut_layers(
            self.schedule, ctx.shards("stage"), self.parts.num_layers, self.parts.head, self.parts.stacked_layers
        )

    def moves(self, ctx: ParallelContext) -> Exchange | None:
        """How layers come to where the schedule wants them; None if they lie there, or all on every stage."""
        cut, stored = self.cut(ctx), self.parts.stacked_layers // ctx.shards("stage")
        return exchange(cut, stored) if ctx.axes("layers") and not cut.lies_in_order(stored) else None


class _Slots(NamedTuple):
    """What lasts longer than a tick.

    Args:
      inbox: [slot, batch, residual_seq, embed], messages that wait; the last slot is never read.
      residuals, stash: lists of [slot, layer, ...].
      layers: sums of the gradients of the layers.
      sums: of the loss, the tokens, and the gradients of the other parameters.
      auxiliary: sums of the layers' losses and metrics, weighted by the tokens.
    """

    inbox: jax.Array
    residuals: list[jax.Array]
    stash: list[jax.Array]
    layers: Any
    sums: Sums
    auxiliary: Auxiliary


class _Stage:
    """The program of a stage, which is that of all: they differ in the number `stage` alone."""

    def __init__(
        self, pipeline: Pipeline, params: Any, batch: Batch, key: jax.Array | None, forward_only: bool = False
    ):
        self.ctx = ctx = _manual()
        self.parts, self.key = pipeline.parts, key
        self.ticks, self.cut = pipeline.plan(ctx, forward_only)
        self.num_microbatches = pipeline.schedule.num_microbatches
        # [rows / m, m, ...]: a microbatch is read where it lies, and never laid out anew.
        self.batch = jax.tree.map(lambda a: a.reshape(-1, self.num_microbatches, *a.shape[1:]), batch)
        self.at_ends = (self.num_microbatches, self.num_microbatches * pipeline.schedule.chunks_per_stage)
        self.axes, self.everywhere = ctx.stage_axes, ctx.gradient_axes
        self.stage = lax.axis_index(self.axes) if self.axes else jnp.int32(0)
        self.exchange = pipeline.moves(ctx)
        self.layers = self._enter(params[self.parts.layers])
        self.outer = {name: value for name, value in params.items() if name != self.parts.layers}
        self.indices = jnp.asarray(self.cut.layers.reshape(ctx.shards("stage"), -1))[self.stage]
        self.rows = jnp.arange(self.indices.size, dtype=jnp.int32) if ctx.axes("layers") else self.indices
        x = jax.eval_shape(partial(self._embed, self.outer), self._micro(jnp.int32(0)))
        self.x = varying(jnp.zeros(x.shape, x.dtype), self.everywhere)
        self.split = self._split()

    def gradients(self, dtype: Any) -> tuple[Totals, Any]:
        slots = lax.scan(self._tick, self._empty(dtype), self._table())[0]
        total, count, outer = slots.sums
        losses, metrics = slots.auxiliary
        for x in losses.values():
            total += x.astype(total.dtype)
        layers = slots.layers if self.exchange is None else self.exchange.backward(slots.layers, self.axes, self.stage)
        return (total, count, metrics | losses), outer | {self.parts.layers: layers}

    def evaluation(self) -> Totals:
        inbox = zeros_of(self.x, self.ticks.num_inbox + 1)
        start = (inbox, self._no_loss(), self._no_auxiliary())
        _, sums, (losses, metrics) = lax.scan(self._forward_tick, start, self._table())[0]
        return *sums, metrics | losses

    # A tick --------------------------------------------------------------------------------------------------

    def _tick(self, slots: _Slots, rows: TableRow) -> tuple[_Slots, None]:
        row = self._mine(rows)
        changed = (self.x, slots.residuals, slots.auxiliary)
        out, residuals, auxiliary = self._if("F", row, self._forward, changed, slots.inbox)
        slots = slots._replace(residuals=residuals, auxiliary=auxiliary)
        out, stash, sums = self._if("B", row, self._backward, (out, slots.stash, slots.sums), slots)
        slots = slots._replace(stash=stash, sums=sums)
        layers = self._if("W", row, self._weights, slots.layers, slots)
        return slots._replace(layers=layers, inbox=self._hand_on(slots.inbox, out, row)), None

    def _forward_tick(self, carry: Any, rows: TableRow) -> tuple[Any, None]:
        row, (inbox, sums, auxiliary) = self._mine(rows), carry
        out, _, auxiliary = self._if("F", row, self._forward, (self.x, [], auxiliary), inbox)
        ended = (row.kind == KINDS["F"]) & (row.last == 1)
        sums = _if(ended, self._loss, sums, out, row, taken=(self.num_microbatches, self.ticks.num_ticks))
        return (self._hand_on(inbox, out, row), sums, auxiliary), None

    def _hand_on(self, inbox: jax.Array, out: jax.Array, row: TableRow) -> jax.Array:
        """One permute to the right and one to the left; each stage keeps what its table says."""
        n = self.ctx.shards("stage")
        shifts = [(1, row.from_left), (-1, row.from_right)][: num_permutes(n)]
        for by, slot in shifts:
            message = lax.ppermute(out, self.axes, [(i, (i + by) % n) for i in range(n)])
            inbox = inbox.at[slot].set(message)
        return inbox.at[row.own].set(out)

    def _if(self, kind: str, row: TableRow, change: Callable[..., Any], changed: Any, *args: Any) -> Any:
        """If the row is of this kind; each stage has as many of each."""
        taken = (self.at_ends[1], self.ticks.num_ticks)
        return _if(row.kind == KINDS[kind], change, changed, *args, row, taken=taken)

    # The three operations: (what they change, ...) -> that --------------------------------------------------------

    def _forward(self, changed: Any, inbox: jax.Array, row: TableRow) -> Any:
        embed = lambda: self._typed(self._embed(self.outer, self._micro(row.microbatch)))

        weights = self._weights_of(row, self.split.auxiliary)

        def layer(carry: Any, i: jax.Array, params: Any, rest: Any) -> Any:
            x, kept, sums = carry
            y, auxiliary, residuals = self.split.forward(params, x, rest)
            sums = jax.tree.map(lambda total, weight, more: total + weight * more, sums, weights, auxiliary)
            return y, [a.at[row.residual, i].set(r) for a, r in zip(kept, residuals, strict=bool(kept))], sums

        with _taken(*self.at_ends):
            x = lax.cond(row.first == 1, embed, lambda: inbox[row.inbox])
        return self._each_layer(layer, (x, *changed[1:]), row)

    def _backward(self, changed: Any, slots: _Slots, row: TableRow) -> Any:
        _, stash, sums = changed
        dlosses = self._weights_of(row, self.split.auxiliary.losses)
        dy, sums = _if(row.last == 1, self._loss_gradient, (slots.inbox[row.inbox], sums), row, taken=self.at_ends)

        def layer(carry: Any, i: jax.Array, params: Any, rest: Any) -> Any:
            dy, kept = carry
            residuals = [a[row.residual, i] for a in slots.residuals]
            dx, stash = self.split.input_gradient(params, residuals, dy, dlosses, rest)
            return dx, [a.at[row.stash, i].set(s) for a, s in zip(kept, stash, strict=True)]

        dx, stash = self._each_layer(layer, (dy, stash), row, reverse=True)
        return dx, stash, _if(row.first == 1, self._embedding_gradient, sums, dx, row, taken=self.at_ends)

    def _weights(self, sums: Any, slots: _Slots, row: TableRow) -> Any:
        def layer(sums: Any, i: jax.Array, params: Any, rest: Any) -> Any:
            residuals = [a[row.residual, i] for a in slots.residuals]
            stash = [a[row.stash, i] for a in slots.stash]
            grads = self.split.weight_gradient(params, residuals, stash, rest)
            at = self.rows[row.chunk * self.cut.longest + i]
            return jax.tree.map(lambda total, g: total.at[at].add(g.astype(total.dtype)), sums, grads)

        return self._each_layer(layer, sums, row)

    def _each_layer(self, body: Callable[..., Any], carry: Any, row: TableRow, reverse: bool = False) -> Any:
        """`body(carry, i, params, rest)` for each layer of the chunk that a row of the table names."""
        batch = self._micro(row.microbatch)
        shared = self.parts.shared(batch, self.x)

        def step(carry: Any, i: jax.Array) -> tuple[Any, None]:
            at = row.chunk * self.cut.longest + i
            run = lambda carry: body(carry, i, self._params(at), (batch, shared, self.key, self.indices[at]))
            return run(carry) if self.cut.is_even else _if(self.indices[at] >= 0, run, carry, taken=(1, 1)), None

        return lax.scan(step, carry, jnp.arange(self.cut.longest, dtype=jnp.int32), reverse=reverse)[0]

    # The ends of the model ---------------------------------------------------------------------------------------

    def _embed(self, outer: Any, batch: Batch) -> jax.Array:
        return self.parts.embed(self._whole(outer), batch, self.key)

    def _embedding_gradient(self, sums: Sums, dx: jax.Array, row: TableRow) -> Sums:
        embed = lambda outer: self._typed(self._embed(outer, self._micro(row.microbatch)))
        total, count, grads = sums
        return total, count, _added(grads, jax.vjp(embed, self.outer)[1](dx)[0])

    def _loss_gradient(self, changed: Any, row: TableRow) -> Any:
        y, (total, count, grads) = changed
        loss = lambda outer, y: self.parts.loss(self._whole(outer), y, self._micro(row.microbatch))
        (more, tokens), (d_outer, dy) = jax.value_and_grad(loss, (0, 1), has_aux=True)(self.outer, y)
        return dy, (total + more, count + tokens, _added(grads, d_outer))

    def _loss(self, sums: Any, y: jax.Array, row: TableRow) -> Any:
        more = self.parts.loss(self._whole(self.outer), y, self._micro(row.microbatch))
        return jax.tree.map(jnp.add, sums, more)

    def _enter(self, layers: Any) -> Any:
        return layers if self.exchange is None else self.exchange.forward(layers, self.axes, self.stage)

    # What they read ------------------------------------------------------------------------------------------------

    def _split(self) -> Split:
        batch = self._micro(self.stage)
        rest = (batch, self.parts.shared(batch, self.x), self.key, self.indices[0])

        def layer(params: Any, x: jax.Array, rest: Any) -> tuple[jax.Array, Auxiliary]:
            y, auxiliary = self.parts.layer(params, x, *rest)
            return self._typed(y), jax.tree.map(self._per_row, auxiliary)

        return split(layer, self.parts.policy, self._params(self.stage), self.x, rest)

    def _empty(self, dtype: Any) -> _Slots:
        room = lambda kept, slots: [zeros_of(aval, slots, self.cut.longest) for aval in kept]
        zeros = lambda tree: jax.tree.map(lambda p: varying_like(jnp.zeros_like(summed_in(p, dtype)), p), tree)
        return _Slots(
            zeros_of(self.x, self.ticks.num_inbox + 1),
            room(self.split.residuals, self.ticks.num_residuals),
            room(self.split.stash, self.ticks.num_stashes),
            zeros(self.layers),
            (*self._no_loss(), zeros(self.outer)),
            self._no_auxiliary(),
        )

    def _no_loss(self) -> tuple[jax.Array, jax.Array]:
        return self._per_row(wide(jnp.zeros((), self.x.dtype))), self._per_row(jnp.int32(0))

    def _no_auxiliary(self) -> Auxiliary:
        return jax.tree.map(zeros_of, self.split.auxiliary)

    def _weights_of(self, row: TableRow, auxiliary: Any) -> Any:
        """By what a microbatch's auxiliary losses and metrics are weighted: the number of its tokens, for each."""
        if not jax.tree.leaves(auxiliary):
            return auxiliary
        count = self._per_row(self.parts.count(self._micro(row.microbatch)))
        return jax.tree.map(lambda x: count.astype(x.dtype), auxiliary)

    def _table(self) -> TableRow:
        return jax.tree.map(jnp.asarray, self.ticks.rows)

    def _mine(self, rows: TableRow) -> TableRow:
        return jax.tree.map(lambda column: column[self.stage], rows)

    def _micro(self, microbatch: jax.Array) -> Batch:
        index = varying(microbatch, self.axes)
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, axis=1, keepdims=False), self.batch)

    def _params(self, at: jax.Array) -> Any:
        row = varying(self.rows[at], self.axes)
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, row, keepdims=False), self.layers)

    def _whole(self, outer: Any) -> Any:
        return outer | {self.parts.layers: self.layers}

    def _per_row(self, x: jax.Array) -> jax.Array:
        """A scalar, typed as one that differs between devices with other rows or layers."""
        return varying(x, self.ctx.loss_axes)

    def _typed(self, x: jax.Array) -> jax.Array:
        return varying(x, self.everywhere)


def num_permutes(num_stages: int) -> int:
    """In a tick: to the left and to the right; of two stages each is the other's only neighbour."""
    return min(2, num_stages - 1)


def _if(condition: jax.Array, change: Callable[..., Any], changed: Any, *args: Any, taken: tuple[int, int]) -> Any:
    """`change(changed, *args)` if so, else `changed` as it is, in place.

    Args:
      taken: (so often, of so many times), on a stage that does it at all.
    """
    with _taken(*taken):
        return lax.cond(condition, change, lambda changed, *_: changed, changed, *args)


def _taken(times: int, of: int) -> Any:
    """Says in the program's text how often a conditional is taken, for whoever counts what it does."""
    return jax.named_scope(f"taken_{times}_of_{of}")


def _added(sums: Any, grads: Any) -> Any:
    return jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, grads)


def _manual() -> ParallelContext:
    ctx = manual()
    assert ctx is not None, "only within the manual lowering"
    return ctx
