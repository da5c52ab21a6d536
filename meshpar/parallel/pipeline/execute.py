"""Runs any pipeline schedule as one program: a scan over ticks, in which each stage looks up its operation in a table.

A tick is three conditionals (F, B, W), of which a stage runs at most one, and a switch over the distinct patterns of
messages: a permute of the stages that send, and another where a stage receives two messages. All devices look up the
same pattern, so all of them run the same permutes. Values that outlive a tick are in slots that are updated in place.
XLA can do this because each conditional on them has two branches, one of which changes nothing; a switch over three
operations would copy every slot and every sum in every tick. The switch over patterns has only messages as operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives.permute import permute
from meshpar.mesh.varying import varying
from meshpar.parallel.batch import Batch, split_off_shared
from meshpar.parallel.context import ParallelContext, manual
from meshpar.parallel.local import zeros_of
from meshpar.parallel.outputs import Shares
from meshpar.parallel.pipeline.exchange import Exchange, exchange
from meshpar.parallel.pipeline.layers import StageLayers, zeros_for_sums
from meshpar.parallel.pipeline.model import Stages, Totals
from meshpar.parallel.pipeline.partition import StagePartition, cut_layers, cut_stacks
from meshpar.parallel.pipeline.schedule import Schedule
from meshpar.parallel.pipeline.schedule_table import KINDS, Pattern, ScheduleTable, TableRow, tick_table
from meshpar.parallel.pipeline.simulate import check_complete
from meshpar.parallel.precision import wide
from meshpar.parallel.scopes import run_if, taken
from meshpar.parallel.trainable import as_in, filled
from meshpar.parallel.xla import in_order, row_major

Sums = tuple[Any, Any]


@dataclass(frozen=True)
class Pipeline:
    """A model and the schedule that runs it.

    Args:
      in_schedule_order: whether each stage already has the layers that it computes with; otherwise they are in the
        model's order, and each call moves them.
    """

    parts: Stages
    schedule: Schedule
    in_schedule_order: bool = False

    def gradients(
        self, params: Any, trained: Any, batch: Batch, key: jax.Array | None, carried: Any, sums: Any
    ) -> tuple[Totals, Any, Any]:
        """The totals and the summed gradients of this device's rows, and the next carried state.

        Args:
          params: the result of `parallel.data.gather_params`.
          trained: `params` without those that have no gradient, see `parallel.trainable`.
          batch: local rows; their number is a multiple of the number of microbatches.
          sums: the dtype in which gradients are summed; None for at least float32.

        Communication: the messages of the schedule, over the stage axes; each is an activation of a microbatch. On p
          stages with v chunks these are 2 m (p v - 1) messages, less those of a stage to itself.
        Memory: the residuals of a layer for each microbatch that the schedule holds at once.
        """
        divided = self.parts.divided
        states, carried = self.parts.states(carried, key, self.schedule.num_microbatches)
        totals, grads = _Stage(self, divided(params), divided(trained), batch, key, states).gradients(sums)
        return totals, as_in(trained, self.parts.joined(grads)), carried

    def evaluation(self, params: Any, batch: Batch, carried: Any) -> Totals:
        """The totals: runs only the forwards, in the order of the schedule."""
        params = self.parts.divided(params)
        states, _ = self.parts.states(carried, None, self.schedule.num_microbatches)
        return _Stage(self, params, params, batch, None, states, forward_only=True).evaluation()

    def plan(self, ctx: ParallelContext, forward_only: bool = False) -> tuple[ScheduleTable, StagePartition]:
        """The table of the schedule, and the layers of each stage.

        Raises:
          ScheduleError: the schedule is incomplete, or its stages wait for each other.
        """
        num_stages = ctx.shards("stage")
        orders = self.schedule.orders(num_stages)
        check_complete(orders, self.schedule)
        if forward_only:
            orders = [[op for op in order if op.kind == "F"] for order in orders]
        return tick_table(orders, self.schedule), self.cut(ctx)

    def cut(self, ctx: ParallelContext) -> StagePartition:
        """The layers of each stage; those of several stacks are numbered through."""
        layers = self.parts.layer_counts()
        if layers.then:
            return cut_stacks(self.schedule, ctx.shards("stage"), layers)
        return cut_layers(self.schedule, ctx.shards("stage"), layers.num_layers, layers.head, layers.stacked)

    def moves(self, ctx: ParallelContext) -> list[Exchange | None]:
        """The exchange that moves each stack's layers to their stages; None if they are there, or on all stages."""
        stacks = self.parts.layer_counts().stacks
        found = []
        for layers, cut in zip(stacks, self.cuts(ctx), strict=True):
            stored = layers.stacked // ctx.shards("stage")
            is_moved = layers.is_stacked and ctx.axes("layers") and not cut.lies_in_order(stored)
            found.append(exchange(cut, stored) if is_moved else None)
        return found

    def cuts(self, ctx: ParallelContext) -> list[StagePartition]:
        """The layers of each stage, for each stack alone."""
        cut, stacks = self.cut(ctx), self.parts.layer_counts().stacks
        if len(stacks) == 1:
            return [cut]
        counts = [stack.num_layers for stack in stacks]
        return [cut.of(sum(counts[:i]), num) for i, num in enumerate(counts)]

    def permutation(self, ctx: ParallelContext) -> Exchange | None:
        """`moves` of the only stack where each stage computes with as many layers as it stores; else None."""
        moves, *more = self.moves(ctx)
        if more:
            return None
        return moves if moves and self.cut(ctx).is_even and moves.computed == moves.stored else None


class _Slots(NamedTuple):
    """The values of a stage that outlive a tick.

    Args:
      inbox: tree of [slot, ...], messages that are not used yet, such as [slot, batch, residual_seq, embed]; the last
        slot is never read.
      entries: for each stack after the first, tree of [slot, ...]: what it began with, before `LayerStack.enter`.
      residuals, stash: for each stack, lists of [slot, layer, ...].
      layers: for each stack, sums of the layers' gradients.
      sums: the totals of the loss, and sums of the gradients of the other parameters.
      shares: sums of what layers add to the totals.
    """

    inbox: Any
    entries: list[Any]
    residuals: list[list[jax.Array]]
    stash: list[list[jax.Array]]
    layers: list[Any]
    sums: Sums
    shares: Shares


class _Stage:
    """The program of a stage. All stages run the same program; only the number `stage` differs."""

    def __init__(
        self,
        pipeline: Pipeline,
        params: Any,
        trained: Any,
        batch: Batch,
        key: jax.Array | None,
        states: Batch,
        forward_only: bool = False,
    ):
        ctx = manual()
        assert ctx is not None, "a pipeline runs only in the manual lowering"
        self.ctx = ctx
        self.key = key
        self.states = states
        self.ticks, self.cut = pipeline.plan(ctx, forward_only)
        self.num_microbatches = pipeline.schedule.num_microbatches
        # [rows / m, m, ...]: a microbatch is sliced in place, without a change of layout.
        rows, self.shared = split_off_shared(batch)
        self.batch = jax.tree.map(lambda a: a.reshape(-1, self.num_microbatches, *a.shape[1:]), rows)
        self.at_ends = (self.num_microbatches, self.num_microbatches * pipeline.schedule.chunks_per_stage)
        self.num_stages = ctx.shards("stage")
        self.axes = ctx.stage_axes
        self.stage = lax.axis_index(self.axes) if self.axes else jnp.int32(0)
        micro = self._micro(jnp.int32(0))
        self.parts = pipeline.parts.on_shards(params, micro, key)
        self.params = dict(params)
        names = [stack.layers for stack in self.parts.stacks]
        moves = [None] * len(names) if pipeline.in_schedule_order else pipeline.moves(ctx)
        for name, move in zip(names, moves, strict=True):
            if move is not None:
                self.params[name] = move.forward(params[name], self.axes, self.stage)
        trained = as_in(trained, self.params)
        self.layers = {name: trained[name] for name in names}
        self.outer = {name: value for name, value in trained.items() if name not in names}
        x = jax.eval_shape(partial(self._embed, self.outer), micro)
        self.x = self._typed(jax.tree.map(zeros_of, x))
        counts = pipeline.parts.layer_counts().stacks
        parts = zip(self.parts.stacks, counts, pipeline.cuts(ctx), moves, strict=True)
        self.stacks = [
            StageLayers(
                ctx, stack, cut, move, count.is_stacked, len(names) > 1, trained[stack.layers],
                self.params[stack.layers], key,
            )
            for stack, count, cut, move in parts
        ]  # fmt: skip
        for stack in self.stacks:
            stack.differentiate(self._micro(self.stage), self.x, self._typed, self._per_row)
        # A stash of what B computes again would take more than another microbatch in flight.
        self.at_once = not self.ticks.splits and any(stack.split.recomputes for stack in self.stacks)
        self.totals = jax.eval_shape(self.parts.loss, self.params, self.x, micro)

    def gradients(self, dtype: Any) -> tuple[Totals, Any]:
        slots = lax.scan(self._tick, self._empty(dtype), self._table())[0]
        totals, outer = slots.sums
        layers = {s.parts.layers: s.stored(grads) for s, grads in zip(self.stacks, slots.layers, strict=True)}
        return _with_shares(totals, slots.shares), outer | layers

    def evaluation(self) -> Totals:
        start = (self._empty_inbox(), self._no_loss(), self._no_shares())
        _, totals, shares = lax.scan(self._forward_tick, start, self._table())[0]
        return _with_shares(totals, shares)

    # A tick --------------------------------------------------------------------------------------------------

    def _tick(self, slots: _Slots, tick: tuple[TableRow, jax.Array]) -> tuple[_Slots, None]:
        rows, pattern = tick
        row = self._mine(rows)
        changed = (self.x, slots.entries, slots.residuals, slots.shares)
        out, entries, residuals, shares = self._if("F", row, self._forward, changed, slots.inbox)
        slots = slots._replace(entries=entries, residuals=residuals, shares=shares)
        changed = (out, slots.layers if self.at_once else slots.stash, slots.sums)
        out, made, sums = self._if("B", row, self._backward, changed, slots)
        if self.at_once:
            slots = slots._replace(sums=sums, layers=made)
        else:
            slots = slots._replace(sums=sums, stash=made)
            row_of_w = row._replace(kind=in_order(row.kind, out))
            slots = slots._replace(layers=self._if("W", row_of_w, self._weights, slots.layers, slots))
        return slots._replace(inbox=self._send(slots.inbox, out, row, in_order(pattern, slots.layers))), None

    def _forward_tick(self, carry: Any, tick: tuple[TableRow, jax.Array]) -> tuple[Any, None]:
        rows, pattern = tick
        row = self._mine(rows)
        inbox, sums, shares = carry

        def add_loss(sums: Any, y: Any, row: TableRow) -> Any:
            return _added(sums, self.parts.loss(self.params, y, self._micro(row.microbatch)))

        nothing = [[] for _ in self.stacks]
        out, _, _, shares = self._if("F", row, self._forward, (self.x, nothing[1:], nothing, shares), inbox)
        ended = (row.kind == KINDS["F"]) & (row.last == 1)
        sums = run_if(ended, add_loss, sums, out, row, times=(self.num_microbatches, self.ticks.num_ticks))
        return (self._send(inbox, out, row, in_order(pattern, sums)), sums, shares), None

    def _send(self, inbox: Any, out: Any, row: TableRow, pattern: jax.Array) -> Any:
        """Sends the outputs that other stages need; each stage stores messages in the slots of its row.

        Args:
          pattern: the index of the tick's pattern, equal on all devices.
        """

        def send(rounds: Pattern, out: Any) -> list[Any]:
            return [
                jax.tree.map(lambda x: permute(x, self.axes, pairs), out) if pairs else out  # noqa: B023
                for pairs in rounds
            ]

        def stored(inbox: Any, message: Any, slot: jax.Array) -> Any:
            return jax.tree.map(lambda slots, x: slots.at[slot].set(x), inbox, message)

        if self.ticks.num_rounds:
            branches = [partial(send, rounds) for rounds in self.ticks.patterns]
            with taken(*self.ticks.pattern_counts, of=self.ticks.num_ticks):
                messages = lax.switch(pattern, branches, out)
            for round_, message in enumerate(messages):
                inbox = stored(inbox, message, row.received[round_])
        return stored(inbox, out, row.own)

    def _if(self, kind: str, row: TableRow, change: Callable[..., Any], changed: Any, *args: Any) -> Any:
        """Runs `change` if the row is of this kind. Every stage has equally many operations of a kind."""
        times = (self.at_ends[1], self.ticks.num_ticks)
        return run_if(row.kind == KINDS[kind], change, changed, *args, row, times=times)

    def _if_end(self, is_end: jax.Array, change: Callable[..., Any], changed: Any, *args: Any) -> Any:
        """Runs `change` on the stage that has an end of the model."""
        return run_if(is_end == 1, change, changed, *args, times=self.at_ends, stages=self.num_stages)

    # The three operations. Each returns its first argument, changed ------------------------------------------------

    def _forward(self, changed: Any, inbox: Any, row: TableRow) -> Any:
        _, entries, residuals, sums = changed

        def embed() -> Any:
            return self._typed(self._embed(self.outer, self._micro(row.microbatch)))

        def layer(carry: Any, i: jax.Array, params: Any, rest: Any) -> Any:
            x, slots, sums = carry
            y, shares, residuals = stack.split.forward(params, x, rest)
            sums = _added(sums, shares)
            kept = row_major(residuals) if slots else residuals
            return y, [a.at[row.residual, i].set(r) for a, r in zip(slots, kept, strict=bool(slots))], sums

        with taken(self.at_ends[0], of=self.at_ends[1], stages=self.num_stages):
            x = lax.cond(row.first == 1, embed, lambda: _at(inbox, row.inbox))
        entered, filled_slots = [], []
        for number, (stack, slots) in enumerate(zip(self.stacks, residuals, strict=True)):
            if number:
                is_start = stack.starts[row.chunk]
                x, entry = self._if_end(is_start, partial(self._enter, stack), (x, entries[number - 1]), row)
                entered.append(entry)
            batch = self._micro(row.microbatch)
            x, slots, sums = stack.each(layer, (x, slots, sums), row.chunk, batch, self.x)
            filled_slots.append(slots)
        return x, entered, filled_slots, sums

    def _backward(self, changed: Any, slots: _Slots, row: TableRow) -> Any:
        _, made, sums = changed
        dloss = jax.tree.map(lambda x: self._per_row(jnp.ones(x.shape, x.dtype)), self._shares.loss)
        dx, sums = self._if_end(row.last, self._loss_gradient, (_at(slots.inbox, row.inbox), sums), row)

        def layer(carry: Any, i: jax.Array, params: Any, rest: Any) -> Any:
            dy, made = carry
            residuals = [a[row.residual, i] for a in saved]
            dx, stash = stack.split.input_gradient(params, residuals, dy, dloss, rest)
            if self.at_once:
                return dx, stack.add(made, (params, residuals, stash, rest), row.chunk, i)
            return dx, [a.at[row.stash, i].set(s) for a, s in zip(made, row_major(stash), strict=True)]

        found = []
        for number, stack in reversed([*enumerate(self.stacks)]):
            saved, batch = slots.residuals[number], self._micro(row.microbatch)
            dx, of_stack = stack.each(layer, (dx, made[number]), row.chunk, batch, self.x, reverse=True)
            found.insert(0, of_stack)
            if number:
                entry = slots.entries[number - 1]
                is_start = stack.starts[row.chunk]
                dx, sums = self._if_end(is_start, partial(self._entry_gradient, stack), (dx, sums), entry, row)
        return dx, found, self._if_end(row.first, self._embedding_gradient, sums, dx, row)

    def _weights(self, sums: Any, slots: _Slots, row: TableRow) -> Any:
        def layer(total: Any, i: jax.Array, params: Any, rest: Any) -> Any:
            residuals = [a[row.residual, i] for a in slots.residuals[number]]
            stash = [a[row.stash, i] for a in slots.stash[number]]
            return stack.add(total, (params, residuals, stash, rest), row.chunk, i)

        found = []
        for number, stack in enumerate(self.stacks):
            found.append(stack.each(layer, sums[number], row.chunk, self._micro(row.microbatch), self.x))
        return found

    # Between stacks ------------------------------------------------------------------------------------------------

    def _enter(self, stack: StageLayers, changed: Any, row: TableRow) -> Any:
        """What stands before a stack that is not the first; keeps its input for the backward."""
        x, entry = changed
        kept = jax.tree.map(lambda slots, x: slots.at[row.residual].set(x), entry, x) if entry else entry
        return self._entered(stack, self.outer, x, row), kept

    def _entered(self, stack: StageLayers, outer: Any, x: Any, row: TableRow) -> Any:
        assert stack.parts.enter is not None, "a stack that is not the first has something that stands before it"
        return self._typed(stack.parts.enter(self._whole(outer), x, self._micro(row.microbatch)))

    def _entry_gradient(self, stack: StageLayers, changed: Any, entry: Any, row: TableRow) -> Any:
        def enter(outer: Any, x: Any) -> Any:
            return self._entered(stack, outer, x, row)

        dx, (totals, grads) = changed
        d_outer, dx = jax.vjp(enter, self.outer, _at(entry, row.residual))[1](dx)
        return dx, (totals, _added(grads, d_outer))

    # The ends of the model ---------------------------------------------------------------------------------------

    def _embed(self, outer: Any, batch: Batch) -> Any:
        return self.parts.embed(self._whole(outer), batch, self.key)

    def _embedding_gradient(self, sums: Sums, dx: Any, row: TableRow) -> Sums:
        def embed(outer: Any) -> Any:
            return self._typed(self._embed(outer, self._micro(row.microbatch)))

        totals, grads = sums
        return totals, _added(grads, jax.vjp(embed, self.outer)[1](dx)[0])

    def _loss_gradient(self, changed: Any, row: TableRow) -> Any:
        def loss(outer: Any, y: Any) -> tuple[jax.Array, Totals]:
            totals = self.parts.loss(self._whole(outer), y, self._micro(row.microbatch))
            return totals[0], totals

        y, (totals, grads) = changed
        (_, more), (d_outer, dy) = jax.value_and_grad(loss, (0, 1), has_aux=True)(self.outer, y)
        return dy, (_added(totals, more), _added(grads, d_outer))

    # The inputs of the operations ----------------------------------------------------------------------------------

    def _empty(self, dtype: Any) -> _Slots:
        stacks = self.stacks
        kept = jax.tree.map(lambda x: varying(zeros_of(x, self.ticks.num_residuals), self.axes), self.x)
        return _Slots(
            self._empty_inbox(),
            [kept for _ in stacks[1:]],
            [stack.room(stack.split.residuals, self.ticks.num_residuals) for stack in stacks],
            [[] if self.at_once else stack.room(stack.split.stash, self.ticks.num_stashes) for stack in stacks],
            [stack.zeros(dtype) for stack in stacks],
            (self._no_loss(), zeros_for_sums(self.outer, dtype)),
            self._no_shares(),
        )

    @property
    def _shares(self) -> Shares:
        """The types of what a layer adds to the totals. Layers of several stacks add nothing."""
        return self.stacks[0].split.shares

    def _empty_inbox(self) -> Any:
        return jax.tree.map(lambda x: zeros_of(x, self.ticks.num_inbox + 1), self.x)

    def _no_loss(self) -> Totals:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.totals)
        total, *others = jax.tree.map(self._per_row, zeros)
        return wide(total), *others  # pyright: ignore

    def _no_shares(self) -> Shares:
        return jax.tree.map(lambda x: wide(zeros_of(x)), self._shares)

    def _table(self) -> tuple[TableRow, jax.Array]:
        return jax.tree.map(jnp.asarray, (self.ticks.rows, self.ticks.pattern))

    def _mine(self, rows: TableRow) -> TableRow:
        return jax.tree.map(lambda column: column[self.stage], rows)

    def _micro(self, microbatch: jax.Array) -> Batch:
        index = varying(microbatch, self.axes)
        rows = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, axis=1, keepdims=False), self.batch)
        states = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False), self.states)
        return rows | self.shared | states

    def _whole(self, outer: Any) -> Any:
        return filled(outer | self.layers, self.params)

    def _per_row(self, x: jax.Array) -> jax.Array:
        """Types a scalar as different on devices with different rows or layers."""
        return varying(x, self.ctx.loss_axes + self.ctx.slice_axes)

    def _typed(self, x: Any) -> Any:
        """Types a message as different on devices with different rows, parts of the sequence or layers."""
        return jax.tree.map(lambda x: varying(x, self.ctx.gradient_axes + self.ctx.slice_axes), x)


def _at(tree: Any, slot: jax.Array) -> Any:
    return jax.tree.map(lambda x: x[slot], tree)


def _added(sums: Any, grads: Any) -> Any:
    return jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, grads)


def _with_shares(totals: Totals, shares: Shares) -> Totals:
    total, count, metrics = totals
    total = total if shares.loss is None else total + shares.loss.astype(total.dtype)
    more = {name: metrics[name] + x.astype(metrics[name].dtype) for name, x in shares.metrics.items()}
    return total, count, metrics | more
