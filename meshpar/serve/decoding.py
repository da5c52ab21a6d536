"""Compiles the two programs of generation: `prefill` computes the prompts, `decode` one token per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from meshpar.errors import Problems, ShardingError
from meshpar.nn.attention.cached import CACHE_DIMS, KVCache
from meshpar.nn.describe import describe, functional
from meshpar.nn.transformer import Batch, Decoder
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.strategies import Parallel
from meshpar.serve.sampling import Sampling, sample
from meshpar.sharding.resolve import Placement, resolve
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.train.program import compile_program, on_shards, pspecs, shardings, structs, trace
from meshpar.train.state import stored


class Turn(NamedTuple):
    """The newest token of each row.

    Args:
      tokens: int32[batch]. Token ids.
      positions: int32[batch]. Positions of the tokens.
    """

    tokens: Any
    positions: Any


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """The settings of a generation, from which both programs are compiled before any array exists.

    Args:
      model: the decoder's config.
      ctx: mesh, rules, lowering and compute dtype; see `for_tokens`.
      dtype: the dtype in which parameters are stored.
      sampling: how tokens are selected.
      num_rows: rows of the batch, a multiple of its shards.
      prompt_len: tokens of the longest prompt.
      max_tokens: tokens of the longest answer.

    Raises:
      ShardingError: the rules shard the sequence or the layers, which generation does not support.
    """

    model: Decoder
    ctx: ParallelContext
    dtype: np.dtype
    sampling: Sampling
    num_rows: int
    prompt_len: int
    max_tokens: int

    def __post_init__(self) -> None:
        problems = Problems()
        for dim in ("seq", "residual_seq", "layers"):
            if axes := dim in self.ctx.rules.table and self.ctx.axes(dim):
                fix = f"mesh.{axes[0]}=1, or rules.{dim}=[]: a checkpoint is restored to any mesh"
                problems.add(f"rules.{dim}", f"one token cannot be divided over {', '.join(axes)}", fix)
        problems.raise_any(ShardingError, "the rules do not fit generation:")

    @cached_property
    def params(self) -> Any:
        """Tree of `Placement` of the parameters."""
        abstract = nnx.eval_shape(lambda: self.model.build(nnx.Rngs(0)))
        specs = jax.tree.map(lambda s: ArraySpec(s.shape, self.dtype, s.dims), describe(abstract))
        return stored(resolve(specs, self.ctx.rules, self.ctx.mesh), self.ctx.rules)

    @cached_property
    def cache(self) -> KVCache:
        """Placements of the cache, in the dtype of the computation, by the same rules as the heads that fill it.

        Memory: 2 layers rows slots kv_heads head_dim elements on all devices together, with a slot for each token of
          prompt and answer; each device holds its rows and heads.
        """
        model = self.model
        num_slots = self.prompt_len + self.max_tokens
        shape = (model.num_layers, self.num_rows, num_slots, model.kv_heads, model.head_size)
        spec = ArraySpec(shape, np.dtype(self.ctx.compute_dtype), CACHE_DIMS)
        axes = tuple(self.ctx.axes(dim) for dim in spec.dims)
        placed = Placement(spec, self.ctx.mesh, axes)
        return KVCache(placed, placed)  # pyright: ignore[reportArgumentType]

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache on one device."""
        return sum(placement.local_bytes for placement in jax.tree.leaves(self.cache))

    @property
    def prompts(self) -> Turn:
        """Structs of the prompts: int32[batch, seq] tokens, padded on the right; and int32[batch] lengths."""
        return Turn(self._per_row(self.prompt_len), self._per_row())

    @property
    def turn(self) -> Turn:
        """Structs of a turn."""
        return Turn(self._per_row(), self._per_row())

    def compile_prefill(self) -> Callable[..., Any]:
        """(params, prompts) -> (the first turn, the cache). The cache is allocated in shards."""

        def prefill(params: Any, prompts: Turn) -> tuple[Turn, KVCache]:
            tokens, lengths = prompts
            empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), structs(self.cache))
            positions = jnp.broadcast_to(jnp.arange(self.prompt_len, dtype=jnp.int32), tokens.shape)
            return self._step(params, tokens, positions, lengths - 1, empty)

        return compile_program(trace(prefill, (structs(self.params), self.prompts), self._out))

    def compile_decode(self) -> Callable[..., Any]:
        """(params, turn, cache) -> (the next turn, the cache). The cache is donated, and written in place."""

        def decode(params: Any, turn: Turn, cache: KVCache) -> tuple[Turn, KVCache]:
            last = jnp.zeros_like(turn.positions)
            return self._step(params, turn.tokens[:, None], turn.positions[:, None], last, cache)

        arguments = (structs(self.params), self.turn, structs(self.cache))
        return compile_program(trace(decode, arguments, self._out, donate=(2,)))

    def logits(self, params: Any, batch: Batch, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """`Transformer.decode` on global arrays, in either lowering."""
        cache_pspecs = pspecs(self.cache)
        in_specs = (pspecs(self.params), self.ctx.pspec("batch"), cache_pspecs)
        out_specs = (self.ctx.pspec("batch", "vocab"), cache_pspecs)

        def decode(params: Any, batch: Batch, cache: KVCache) -> tuple[jax.Array, KVCache]:
            return self._apply(jax.tree.map(lambda x: x.astype(self.ctx.compute_dtype), params), batch, cache)

        return on_shards(decode, self.ctx, in_specs, out_specs)(params, batch, cache)

    def _step(
        self, params: Any, tokens: jax.Array, positions: jax.Array, last: jax.Array, cache: KVCache
    ) -> tuple[Turn, KVCache]:
        """Computes tokens, and selects the next one of each row."""
        rows = jnp.arange(self.num_rows, dtype=jnp.int32)
        batch = {"tokens": tokens, "positions": positions, "last": last, "rows": rows}
        logits, cache = self.logits(params, batch, cache)
        next_positions = jnp.take_along_axis(positions, last[:, None], axis=1)[:, 0] + 1
        select = partial(sample, how=self.sampling, vocab_size=self.model.vocab_size)
        per_row = self.ctx.pspec("batch")
        in_specs = (self.ctx.pspec("batch", "vocab"), per_row, per_row)
        chosen = on_shards(select, self.ctx, in_specs, per_row)(logits, rows, next_positions)
        return Turn(chosen, next_positions), cache

    @cached_property
    def _apply(self) -> Callable[..., Any]:
        return functional(nnx.eval_shape(lambda: self.model.build(nnx.Rngs(0))), "decode")

    def _per_row(self, *shape: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.ctx.mesh, self.ctx.pspec("batch"))  # pyright: ignore
        return jax.ShapeDtypeStruct((self.num_rows, *shape), jnp.int32, sharding=sharding)

    @property
    def _out(self) -> Any:
        return shardings((self.turn, structs(self.cache)))


def for_tokens(ctx: ParallelContext) -> ParallelContext:
    """Removes sequence parallelism, microbatches and strategies: a step of decoding has one token per row.

    Devices that shared rows in training get rows of their own.
    """
    rules = ctx.rules
    tokens = {"batch": rules["batch"] + rules["seq"], "seq": (), "residual_seq": ()}
    whole = AxisRules(preset=rules.preset, zero=rules.zero, **rules.explicit | tokens)  # pyright: ignore
    return replace(ctx, rules=whole, parallel=Parallel(), num_microbatches=1)
