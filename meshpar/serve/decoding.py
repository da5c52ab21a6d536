"""Compiles the two programs of generation: `prefill` computes the prompts, `decode` one token per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshpar.nn.attention.cached import CACHE_DIMS, ContinuedCache, KVCache
from meshpar.nn.transformer import Batch
from meshpar.serve.on_mesh import ModelOnMesh
from meshpar.serve.sampling import Sampling, sample
from meshpar.train.program import compile_program, on_shards, pspecs, shardings, structs, trace


class Turn(NamedTuple):
    """The newest token of each row.

    Args:
      tokens: int32[batch]. Token ids.
      positions: int32[batch]. Positions of the tokens.
    """

    tokens: Any
    positions: Any


@dataclass(frozen=True, kw_only=True)
class Decoding(ModelOnMesh):
    """The settings of a generation, from which both programs are compiled before any array exists.

    Args:
      sampling: how tokens are selected.
      num_rows: rows of the batch, a multiple of its shards.
      prompt_len: tokens of the longest prompt.
      max_tokens: tokens of the longest answer.
      num_drafts: tokens after the longest answer that may be stored too, see `speculative`.
    """

    sampling: Sampling
    num_rows: int
    prompt_len: int
    max_tokens: int
    num_drafts: int = 0

    @property
    def num_slots(self) -> int:
        """Tokens of a row that the cache has slots for."""
        return self.prompt_len + self.max_tokens + self.num_drafts

    @cached_property
    def cache(self) -> KVCache:
        """Placements of the cache, by the same rules as the heads that fill it.

        Memory: 2 layers rows slots kv_heads head_dim elements on all devices together, with a slot for each token of
          prompt and answer; each device holds its rows and heads. In int8 an element has one byte, and each token of a
          head a scale in the dtype of the computation.
        """
        model = self.model
        shape = (model.num_layers, self.num_rows, self.num_slots, model.kv_heads, model.head_size)
        placed = self.placed_cache(shape, CACHE_DIMS)
        return KVCache(placed, placed)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache on one device."""
        return sum(placement.local_bytes for placement in jax.tree.leaves(self.cache))

    @property
    def prompts(self) -> Turn:
        """Structs of the prompts: int32[batch, seq] tokens, padded on the right; and int32[batch] lengths."""
        return Turn(self.per_row(self.num_rows, self.prompt_len), self.per_row(self.num_rows))

    @property
    def turn(self) -> Turn:
        """Structs of a turn."""
        return Turn(self.per_row(self.num_rows), self.per_row(self.num_rows))

    def compile_prefill(self) -> Callable[..., Any]:
        """(params, prompts) -> (the first turn, the cache). The cache is allocated in shards."""
        return compile_program(trace(self.prefill, (structs(self.params), self.prompts), self._out))

    def compile_decode(self) -> Callable[..., Any]:
        """(params, turn, cache) -> (the next turn, the cache). The cache is donated, and written in place."""
        arguments = (structs(self.params), self.turn, structs(self.cache))
        return compile_program(trace(self.decode, arguments, self._out, donate=(2,)))

    def prefill(self, params: Any, prompts: Turn) -> tuple[Turn, KVCache]:
        """The first turn, and a new cache with the prompts."""
        tokens, lengths = prompts
        empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), structs(self.cache))
        positions = jnp.broadcast_to(jnp.arange(self.prompt_len, dtype=jnp.int32), tokens.shape)
        return self._step(params, tokens, positions, lengths - 1, empty)

    def decode(self, params: Any, turn: Turn, cache: KVCache) -> tuple[Turn, KVCache]:
        """The next turn, and the cache with this one."""
        last = jnp.zeros_like(turn.positions)
        return self._step(params, turn.tokens[:, None], turn.positions[:, None], last, cache)

    def continued_logits(self, params: Any, batch: Batch, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """The logits [batch, seq, vocab] after each of several tokens that follow those in the cache."""
        cache_pspecs = pspecs(self.cache)
        in_specs = (pspecs(self.params), self.ctx.pspec("batch"), cache_pspecs)
        out_specs = (self.ctx.pspec("batch", "seq", "vocab"), cache_pspecs)

        def decode(params: Any, batch: Batch, cache: KVCache) -> tuple[jax.Array, KVCache]:
            logits, cache = self.local_logits(params, batch, ContinuedCache(*cache))
            return logits, KVCache(*cache)

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

    @property
    def _out(self) -> Any:
        return shardings((self.turn, structs(self.cache)))
