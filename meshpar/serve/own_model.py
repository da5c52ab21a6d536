"""Decodes with a user's own causal model.

The rows of the batch are slots. With a cache, each slot has one of its own, as of a batch of one row: `vmap` computes
all slots, so that rows of any length are decoded together, whatever form the model's cache has. Without one, each token
recomputes its row, padded to the longest length: one program, compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.errors import ConfigError
from meshpar.interop.causal import Causal, decoded_by, empty_cache, logits_of, logits_of_row
from meshpar.mesh.layout import describe_sizes
from meshpar.parallel.context import ParallelContext, tracing
from meshpar.parallel.precision import computed_in
from meshpar.partition.function import PartitionedFunction, Sharding
from meshpar.serve.decoding import Decoding, RowArrays
from meshpar.serve.on_mesh import ACTIVATION_DIMS, placements
from meshpar.sharding.resolve import Placement
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.train.program import on_host, on_shards, pspecs
from meshpar.tree import human_bytes

CHECKED = 6
"""Tokens whose logits with a cache are compared with those without one."""


@dataclass(frozen=True, kw_only=True)
class OwnDecoding(Decoding):
    """A user's model on a mesh. A page is the cache of a whole row, which its slot has.

    Args:
      model: its forward, and how it decodes with a cache if it does.
      specs: tree of `ArraySpec` of its parameters.
    """

    model: Causal
    specs: Any

    def __str__(self) -> str:
        """What is served, in one line."""
        cache = f", cache {human_bytes(self.cache_bytes)} a device" if self.cache_bytes else ""
        return f"{describe_sizes(dict(self.ctx.mesh.shape))}: {self.capacity.num_rows} slots{cache}; {self.model.how}"

    @property
    def recomputes(self) -> bool:
        return self.model.decoding is None

    @cached_property
    def params(self) -> Any:
        return placements(self.specs, self.ctx, ACTIVATION_DIMS)

    @cached_property
    def logits_struct(self) -> jax.ShapeDtypeStruct:
        """The logits of a token.

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
        return jax.ShapeDtypeStruct(logits.shape[2:], logits.dtype)

    @cached_property
    def logits_ctx(self) -> ParallelContext:
        """Every device has the whole vocabulary of its rows."""
        rules = self.ctx.rules
        whole = AxisRules(preset=rules.preset, zero=rules.zero, **rules.explicit | {"vocab": ()})  # pyright: ignore
        return replace(self.ctx, rules=whole)

    @cached_property
    def pages(self) -> Any:
        """Tree of `Placement` of the cache: the slots, and then the dims of the model's own cache of one row."""
        if self.recomputes:
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

    def _natural(self, shapes: Any, axes: list[Sharding]) -> list[Sharding]:
        """How the planner shards the caches, as by heads; their slots only, if a step would return other shards."""
        rows = self.capacity.num_rows
        others = (jax.ShapeDtypeStruct((rows, 1), jnp.int32), *[jax.ShapeDtypeStruct((rows,), jnp.int32)] * 2)

        def returned(axes: list[Sharding]) -> list[Sharding]:
            arrays = [*axes, (axes[0][0], ()), (axes[0][0],), (axes[0][0],)]
            planned = PartitionedFunction(self._added, self.specs, arrays, [])
            _, cache = planned.natural(self.ctx, self._global_params, shapes, *others)
            found = jax.tree.leaves(cache, is_leaf=lambda x: isinstance(x, tuple))
            return [(axes[0][0], *over[1:]) for over in found]

        found = returned(axes)
        return found if returned(found) == found else axes

    def extended(self, params: Any, batch: Any, rows: RowArrays, pages: Any, is_first: bool) -> tuple[jax.Array, Any]:
        """A row without a page keeps its cache; one that begins at 0 begins with an empty one."""
        counts = jnp.where(rows.table[:, 0] < self.capacity.pages, batch["last"] + 1, 0)
        of_batch, of_cache = self.ctx.axes("batch"), [placement.axes for placement in jax.tree.leaves(self.pages)]
        arrays: Sequence[Sharding] = [*of_cache, (of_batch, ()), (of_batch,), (of_batch,)]
        function = self._recomputed if self.recomputes else self._added
        on_local = PartitionedFunction(function, self.specs, arrays, [(of_batch, ()), *of_cache])

        def computed(params: Any, *arrays: Any) -> Any:
            return on_local(self._computed_in(params), *arrays)

        a_row, of_pages = self.ctx.pspec("batch"), pspecs(self.pages)
        in_specs = (pspecs(self.params), of_pages, a_row, a_row, a_row)
        added = on_shards(computed, self.ctx, in_specs, (a_row, of_pages))
        return added(params, pages, batch["tokens"], counts, batch["positions"][:, 0])

    def _recomputed(
        self, params: Any, cache: Any, tokens: jax.Array, counts: jax.Array, begins: jax.Array
    ) -> tuple[jax.Array, Any]:  # fmt: skip
        """The logits after the last of each row's tokens."""
        logits = logits_of(self.model, params, tokens, self.specs)
        last = jnp.maximum(counts, 1) - 1
        return jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0], cache

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
        first = jnp.zeros((tokens.shape[0], self.vocab_size), self.logits_struct.dtype)
        steps = (tokens.T, jnp.arange(tokens.shape[1], dtype=jnp.int32))
        if tokens.shape[1] == 1:
            (cache, last), _ = add((kept, first), (tokens[:, 0], 0))
        else:
            (cache, last), _ = jax.lax.scan(add, (kept, first), steps)
        return last, cache

    def _empty(self, params: Any) -> Any:
        return empty_cache(self.model, params, self.capacity.max_len, self.specs)

    def _computed_in(self, params: Any) -> Any:
        return jax.tree.map(lambda x: computed_in(x, self.ctx.compute_dtype), params)

    @cached_property
    def _global_params(self) -> Any:
        """The parameters in the dtype of the computation, as structs of whole arrays."""
        arrays = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.spec.shape, p.spec.dtype), self.params)
        return jax.eval_shape(self._computed_in, arrays)

    # The check of the cache --------------------------------------------------------------------------------------

    def check(self, params: Any) -> None:
        """Compares the logits of a few tokens with and without the cache; a stale or partial cache changes them.

        Raises:
          ConfigError: they differ by more than rounding.
        """
        if self.recomputes:
            return
        length = min(CHECKED, self.capacity.max_len)
        tokens = jnp.arange(length, dtype=jnp.int32) * 7 % self.vocab_size
        with tracing(replace(self.ctx, manual=False)):
            both: Callable[..., Any] = jax.jit(self._both).trace(params, tokens).lower().compile()
        cached, whole = (np.float64(x) for x in on_host(both(params, tokens)))
        allowed = 100 * float(jnp.finfo(self.logits_struct.dtype).eps) * max(np.abs(whole).max(), 1.0)
        differences = np.abs(cached - whole).max(-1)
        wrong = ~(differences <= allowed)  # also what is no number
        if wrong.any():
            at = int(np.argmax(wrong))
            what = "with its cache the model has other logits than without it"
            what += f": at token {at} they differ by {differences[at]:.2g}"
            fix = "mend its positions, its mask or what it stores"
            raise ConfigError(f"{what}; {fix}; or CausalModel.of(..., cache=False) recomputes each row")

    def _both(self, params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The logits [seq, vocab] of a row, with the cache and without it."""
        params = self._computed_in(params)

        def step(cache: Any, token: jax.Array) -> tuple[Any, jax.Array]:
            logits, cache = decoded_by(self.model, params, token[None, None], cache, self.capacity.max_len, self.specs)
            return cache, logits[0, 0]

        _, cached = jax.lax.scan(step, self._empty(params), tokens)
        return cached, logits_of_row(self.model, params, tokens[None], self.specs)[0]
