"""The layers of one stack that a stage computes with: which they are, their parameters, and their derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.mesh.varying import varying, varying_like
from meshpar.parallel.batch import Batch
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.local import zeros_of
from meshpar.parallel.outputs import Shares
from meshpar.parallel.pipeline.exchange import Exchange
from meshpar.parallel.pipeline.model import LayerStack
from meshpar.parallel.pipeline.partition import StagePartition
from meshpar.parallel.pipeline.split import Avals, Split, split
from meshpar.parallel.precision import summed_in
from meshpar.parallel.scopes import run_if
from meshpar.parallel.trainable import filled, frozen_in
from meshpar.parallel.xla import run_in_order

Typed = Callable[[Any], Any]


class StageLayers:
    """The layers of a stack on a stage.

    Args:
      is_stored: whether a stage stores its own layers; else it stores all.
      has_others: whether the model has other stacks, so that a chunk may have no layer of this one.
      trained: the parameters of the layers, masked where they have no gradient; `params` has them all.
      key: the step's random key.
    """

    def __init__(
        self,
        ctx: ParallelContext,
        parts: LayerStack,
        cut: StagePartition,
        exchange: Exchange | None,
        is_stored: bool,
        has_others: bool,
        trained: Any,
        params: Any,
        key: jax.Array | None,
    ) -> None:
        self.axes = ctx.stage_axes
        self.stage = lax.axis_index(self.axes) if self.axes else jnp.int32(0)
        self.parts = parts
        self.cut = cut
        self.exchange = exchange
        self.key = key
        self.trained = trained
        self.frozen = frozen_in(trained, params)
        self.indices = jnp.asarray(cut.layers.reshape(ctx.shards("stage"), -1))[self.stage]
        has_own = bool(ctx.axes("layers")) and is_stored
        self.rows = jnp.arange(self.indices.size, dtype=jnp.int32) if has_own else self.indices
        of_this = int((cut.layers >= 0).sum())
        self.times = (of_this, cut.layers.size) if has_others else (1, 1)
        # [chunk]: whether it has the first layer of the stack.
        self.starts = jnp.asarray((cut.layers[..., 0] == 0).astype("int32"))[self.stage]

    def differentiate(self, batch: Batch, x: Any, typed: Typed, per_row: Typed) -> None:
        """Splits the derivative of a layer.

        Args:
          x: a message.
          typed, per_row: type a message, and a scalar, as different on devices with different rows or layers.
        """
        first = jnp.int32(0)

        def layer(trained: Any, x: Any, rest: Any) -> tuple[Any, Shares]:
            frozen, *others = rest
            y, shares = self.parts.layer(filled(trained, frozen), x, *others)
            return typed(y), jax.tree.map(per_row, shares)

        rest = self.rest(first, batch, self.parts.shared(batch, x))
        of_one = self.of(self.trained, first)
        self.split: Split = split(layer, self.parts.policy, of_one, x, rest, self.parts.recomputes)

    def room(self, avals: Avals, num_slots: int) -> list[jax.Array]:
        """Slots for a value of each layer of a chunk."""
        # A stage writes to slots of its own, even a value that is equal on all stages.
        return [varying(zeros_of(aval, num_slots, self.cut.longest), self.axes) for aval in avals]

    def zeros(self, dtype: Any) -> Any:
        return zeros_for_sums(self.trained, dtype)

    def stored(self, grads: Any) -> Any:
        """Gradients of the layers on the stages that store them."""
        return grads if self.exchange is None else self.exchange.backward(grads, self.axes, self.stage)

    def add(self, sums: Any, of_layer: tuple[Any, ...], chunk: jax.Array, i: jax.Array) -> Any:
        """Adds the gradients of layer i of a chunk to the sums of all.

        Args:
          of_layer: arguments of `Split.weight_gradient`.
        """
        grads = self.split.weight_gradient(*of_layer)
        at = self.rows[chunk * self.cut.longest + i]
        return jax.tree.map(lambda total, g: total.at[at].add(g.astype(total.dtype)), sums, grads)

    def each(
        self, body: Callable[..., Any], carry: Any, chunk: jax.Array, batch: Batch, x: Any, reverse: bool = False
    ) -> Any:
        """Runs `body(carry, i, params, rest)` for each layer of a chunk."""
        shared = self.parts.shared(batch, x)

        def step(carry: Any, i: jax.Array) -> tuple[Any, None]:
            at = chunk * self.cut.longest + i

            def run(carry: Any) -> Any:
                return body(carry, i, self.of(self.trained, at), self.rest(at, batch, shared))

            if self.cut.is_even:
                return run(carry), None
            return run_if(self.indices[at] >= 0, run, carry, times=self.times), None

        def run_all(carry: Any) -> Any:
            indices = jnp.arange(self.cut.longest, dtype=jnp.int32)
            return lax.scan(step, carry, indices, reverse=reverse, unroll=min(self.parts.unroll, indices.size))[0]

        return run_in_order(run_all, carry)

    def of(self, layers: Any, place: jax.Array) -> Any:
        row = varying(self.rows[place], self.axes)
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, row, keepdims=False), layers)

    def rest(self, place: jax.Array, batch: Batch, shared: Any) -> Any:
        """A layer's inputs that are not differentiated: its frozen parameters, and further arguments of `layer`."""
        return self.of(self.frozen, place), batch, shared, self.key, self.indices[place]


def zeros_for_sums(tree: Any, dtype: Any) -> Any:
    """Zeros to which gradients of these parameters are added."""
    return jax.tree.map(lambda p: varying_like(jnp.zeros_like(summed_in(p, dtype)), p), tree)
