"""Compiles the programs that generate with a user's own causal model.

The rows of the batch are slots, as in `engine`. With a cache, each slot has one of its own, as of a batch of one row:
`vmap` computes all slots, so that rows of any length are decoded together, whatever form the model's cache has.
Without one, each token recomputes its row, padded to the longest length: one program, compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshpar.errors import ConfigError
from meshpar.interop.causal import Causal, decoded_by, empty_cache, logits_of
from meshpar.parallel.context import ParallelContext, tracing
from meshpar.parallel.precision import computed_in
from meshpar.partition.function import PartitionedFunction, Sharding
from meshpar.serve.adjust import most_adjusted
from meshpar.serve.on_mesh import ACTIVATION_DIMS
from meshpar.serve.sampling import Asked, RowSampling, sample_each
from meshpar.serve.scheduler import Capacity
from meshpar.sharding.resolve import Placement, resolve
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.train.program import compile_program, on_shards, pspecs, shardings, structs, trace, whole
from meshpar.train.state import stored


@dataclass(frozen=True, kw_only=True)
class OwnDecoding:
    """The settings of a generation with a user's model, from which its programs are compiled.

    Args:
      model: its forward, and how it decodes with a cache if it does.
      specs: tree of `ArraySpec` of its parameters.
      ctx: mesh, rules, lowering and compute dtype; see `for_tokens`.
      capacity: rows that are decoded together, and their longest length.
    """

    model: Causal
    specs: Any
    ctx: ParallelContext
    capacity: Capacity

    @cached_property
    def params(self) -> Any:
        """Tree of `Placement` of the parameters."""
        placed = resolve(self.specs, self.ctx.rules, self.ctx.mesh, activation_dims=ACTIVATION_DIMS)
        return stored(placed, self.ctx.rules)

    @property
    def vocab_size(self) -> int:
        """The number of logits of the model."""
        return self._logits.shape[-1]

    @cached_property
    def _logits(self) -> jax.ShapeDtypeStruct:
        """The logits of one row.

        Raises:
          ConfigError: the model returns something else.
        """
        tokens = jax.ShapeDtypeStruct((self.capacity.num_rows, self.capacity.max_len), jnp.int32)
        with tracing(replace(self.ctx, manual=False)):
            logits: Any = jax.eval_shape(partial(logits_of, self.model, specs=self.specs), self._global_params, tokens)
        if getattr(logits, "ndim", 0) != 3 or logits.shape[:2] != tokens.shape:
            found = getattr(logits, "shape", type(logits).__name__)
            call = f"the model, called with tokens{list(tokens.shape)},"
            raise ConfigError(f"{call} returns {found}, not logits [batch, seq, vocab]")
        return logits

    @cached_property
    def cache(self) -> Any:
        """Tree of `Placement` of the cache: the slots, and then the dims of the model's own cache of one row."""
        if self.model.decoding is None:
            return {}
        with tracing(replace(self.ctx, manual=False)):
            empty = jax.eval_shape(self._empty, self._global_params)
        rows = self.capacity.num_rows
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype), empty)
        axes = [(self.ctx.axes("batch"), *[()] * x.ndim) for x in jax.tree.leaves(empty)]
        if self.ctx.manual:
            axes = self._natural(shapes, axes)

        def placed(x: Any, over: Sharding) -> Placement:
            return Placement(ArraySpec(x.shape, np.dtype(x.dtype), ("",) * x.ndim), self.ctx.mesh, over)

        leaves, tree = jax.tree.flatten(shapes)
        return jax.tree.unflatten(tree, list(map(placed, leaves, axes)))

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache on one device."""
        return sum(placement.local_bytes for placement in jax.tree.leaves(self.cache))

    def rows(self) -> RowSampling:
        """Structs of a `RowSampling`."""
        return RowSampling.structs(self.per_row, self.most_adjusted, self.vocab_size)

    @property
    def most_adjusted(self) -> int:
        """The most tokens that a row adjusts."""
        return most_adjusted(self.vocab_size, self.capacity.max_len)

    # Programs ----------------------------------------------------------------------------------------------------

    def compile_recomputing(self) -> Callable[..., Any]:
        """(params, tokens [rows, max_len], lengths [rows], rows, asked) -> int32[rows], the token after each row."""

        def last_logits(params: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
            logits = logits_of(self.model, params, tokens, self.specs)
            return jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1)[:, 0]

        of_rows = (self.ctx.axes("batch"), ())
        local = self._partitioned(last_logits, [of_rows, of_rows[:1]], [of_rows])
        batch = self.ctx.pspec("batch")
        logits = on_shards(local, self.ctx, (pspecs(self.params), batch, batch), batch)

        def following(params: Any, tokens: Any, lengths: Any, rows: RowSampling, asked: Asked) -> jax.Array:
            return self._sampled(logits(params, tokens, lengths), lengths, rows, asked)

        tokens = self.per_row(self.capacity.max_len)
        arguments = (structs(self.params), tokens, self.per_row(), self.rows(), self.asked)
        return compile_program(trace(following, arguments, shardings(self.per_row())))

    def compile_decoding(self, length: int) -> Callable[..., Any]:
        """A program that adds up to `length` tokens to the cache of each row.

        (params, cache, tokens [rows, length], counts [rows], begins [rows], rows, asked) -> (int32[rows] the token
        after each, the cache). A row without tokens keeps its cache; one that begins at 0 begins with an empty one.
        """
        batch, of_cache = self.ctx.pspec("batch"), pspecs(self.cache)
        in_specs = (pspecs(self.params), of_cache, batch, batch, batch)
        local = self._decoding_on_shards([placement.axes for placement in jax.tree.leaves(self.cache)])
        added = on_shards(local, self.ctx, in_specs, (batch, of_cache))

        def decode(
            params: Any, cache: Any, tokens: Any, counts: Any, begins: Any, rows: RowSampling, asked: Asked
        ) -> Any:
            logits, cache = added(params, cache, tokens, counts, begins)
            return self._sampled(logits, begins + counts, rows, asked), cache

        a_row = self.per_row()
        arguments = (
            structs(self.params), structs(self.cache), self.per_row(length), a_row, a_row, self.rows(), self.asked,
        )  # fmt: skip
        return compile_program(trace(decode, arguments, shardings((a_row, structs(self.cache))), donate=(1,)))

    def _added(self, params: Any, cache: Any, tokens: jax.Array, counts: jax.Array, begins: jax.Array) -> Any:
        """Adds tokens to the caches of all rows, one after the other: (the logits after the last, the caches)."""
        empty = self._empty(params)

        def begun(begin: jax.Array, cache: Any) -> Any:
            return jax.tree.map(lambda new, old: jnp.where(begin == 0, new, old), empty, cache)

        def one(cache: Any, last: jax.Array, token: jax.Array, is_added: jax.Array) -> Any:
            logits, new = decoded_by(self.model, params, token[None, None], cache, self.capacity.max_len, self.specs)
            return jax.tree.map(lambda new, old: jnp.where(is_added, new, old), (new, logits[0, 0]), (cache, last))

        def add(carry: Any, at: Any) -> Any:
            (cache, last), (tokens, i) = carry, at
            return jax.vmap(one)(cache, last, tokens, i < counts), None

        kept = jax.vmap(begun)(jnp.where(counts > 0, begins, 1), cache)
        first = jnp.zeros((tokens.shape[0], self.vocab_size), self.logits_dtype)
        steps = (tokens.T, jnp.arange(tokens.shape[1], dtype=jnp.int32))
        if tokens.shape[1] == 1:
            (cache, last), _ = add((kept, first), (tokens[:, 0], 0))
        else:
            (cache, last), _ = jax.lax.scan(add, (kept, first), steps)
        return last, cache

    def _decoding_on_shards(self, of_cache: Sequence[Sharding]) -> Callable[..., Any]:
        rows = self.ctx.axes("batch")
        arrays = [*of_cache, (rows, ()), (rows,), (rows,)]
        return self._partitioned(self._added, arrays, [(rows, ()), *of_cache])

    def _natural(self, shapes: Any, axes: list[Sharding]) -> list[Sharding]:
        """How the planner shards the caches, as by heads; their slots only, if a step would return other shards."""
        rows = self.capacity.num_rows
        others = (jax.ShapeDtypeStruct((rows, 1), jnp.int32), *[jax.ShapeDtypeStruct((rows,), jnp.int32)] * 2)

        def returned(axes: list[Sharding]) -> list[Sharding]:
            planned = self._function(self._added, [*axes, (axes[0][0], ()), (axes[0][0],), (axes[0][0],)], [])
            _, cache = planned.natural(self.ctx, self._global_params, shapes, *others)
            found = jax.tree.leaves(cache, is_leaf=lambda x: isinstance(x, tuple))
            return [(axes[0][0], *over[1:]) for over in found]

        found = returned(axes)
        return found if returned(found) == found else axes

    # Parts -------------------------------------------------------------------------------------------------------

    def _empty(self, params: Any) -> Any:
        return empty_cache(self.model, params, self.capacity.max_len, self.specs)

    def _function(self, function: Callable[..., Any], arrays: Sequence[Sharding], results: Sequence[Sharding]) -> Any:
        return PartitionedFunction(function, self.specs, arrays, results)

    def _partitioned(self, function: Callable[..., Any], arrays: Any, results: Any) -> Callable[..., Any]:
        on_local = self._function(function, arrays, results)

        def computed(params: Any, *arrays: Any) -> Any:
            return on_local(jax.tree.map(lambda x: computed_in(x, self.ctx.compute_dtype), params), *arrays)

        return computed

    def _sampled(self, logits: jax.Array, positions: Any, rows: RowSampling, asked: Asked) -> jax.Array:
        """The next token of each row; every device has the whole vocabulary of its rows."""
        rules = self.ctx.rules
        ctx = replace(
            self.ctx, rules=AxisRules(preset=rules.preset, zero=rules.zero, **rules.explicit | {"vocab": ()})  # pyright: ignore
        )  # fmt: skip
        batch = ctx.pspec("batch")
        in_specs = (batch, batch, jax.tree.map(lambda _: batch, self.rows()), PartitionSpec())
        return on_shards(partial(sample_each, vocab_size=self.vocab_size), ctx, in_specs, batch)(
            logits, positions, rows, asked
        )

    @cached_property
    def _global_params(self) -> Any:
        """The parameters in the dtype of the computation, as structs of whole arrays."""
        arrays = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.spec.shape, p.spec.dtype), self.params)
        return jax.eval_shape(lambda x: jax.tree.map(lambda x: computed_in(x, self.ctx.compute_dtype), x), arrays)

    @property
    def logits_dtype(self) -> Any:
        return self._logits.dtype

    @property
    def asked(self) -> Asked:
        flag = jax.ShapeDtypeStruct((), jnp.bool_, sharding=whole(self.ctx.mesh))
        return Asked(flag, flag, flag, flag)

    def per_row(self, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        sharding = jax.sharding.NamedSharding(self.ctx.mesh, self.ctx.pspec("batch"))  # pyright: ignore
        return jax.ShapeDtypeStruct((self.capacity.num_rows, *shape), dtype, sharding=sharding)
