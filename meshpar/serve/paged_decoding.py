"""Compiles the programs of serving.

`prefill` computes chunks of prompts in each shard, `decode` a token of each row, `verify` a token and its drafts, and
`draft` several tokens of each row, one after the other.
Their sizes are fixed, so that no request compiles anything: which request a row belongs to, how many of its tokens are
padding, its pages and how its tokens are sampled are arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshpar.nn.attention.paged import PAGES_DIMS, EmptyPages, PagedCache
from meshpar.nn.side_adapters import SideAdapters
from meshpar.nn.transformer import Transformer
from meshpar.parallel.precision import wide
from meshpar.serve.adjust import most_adjusted
from meshpar.serve.on_mesh import ModelOnMesh
from meshpar.serve.sampling import Asked, RowSampling, Sampling, sample, sample_each
from meshpar.serve.scheduler import Capacity
from meshpar.serve.scores import MOST_RANKED, TokenScores, score
from meshpar.train.program import compile_program, on_shards, shardings, structs, trace, whole


class Turn(NamedTuple):
    """The newest token of each row.

    Args:
      tokens: int32[batch]. Token ids.
      positions: int32[batch]. Positions of the tokens.
    """

    tokens: Any
    positions: Any


class Pages(NamedTuple):
    """The arrays of a `PagedCache` that a turn writes. Each is donated, and written in place."""

    keys: Any
    values: Any


class RowArrays(NamedTuple):
    """The arrays of a row that do not change while it is decoded.

    Args:
      table: int32 [batch, pages of a row]; None in a batch, where each row is one page.
      sampling: how the tokens of each row are sampled.
      asked: what any row asks for; None where the program knows how all rows are sampled.
      adapters: int32 [batch], the adapter of each row, see `SideAdapters`.
    """

    table: Any
    sampling: RowSampling
    asked: Asked | None
    adapters: Any


class TokenChunks(NamedTuple):
    """Consecutive tokens of each row: a part of a prompt, or the newest token and its drafts.

    Padding repeats the last token at its position. So it stores what is stored there already, and reads nothing else.

    Args:
      tokens: int32 [batch, chunk], padded on the right.
      begins: int32 [batch]. The position of each first token.
      lengths: int32 [batch]. How many are no padding, at least 1.
    """

    tokens: Any
    begins: Any
    lengths: Any


Stepped = tuple[jax.Array, TokenScores | None, Pages]
"""The sampled tokens, the scores if rows may ask for them, and the pages with the computed tokens."""


@dataclass(frozen=True, kw_only=True)
class PagedDecoding(ModelOnMesh):
    """The settings of a server, from which its programs are compiled before any array exists.

    Args:
      capacity: sizes of the batch and of the cache; its shards are those of the batch on the mesh.
      num_drafts: most drafts of a row that `verify` checks; 0 if there are none.
      scores_prompts: whether there is a program that scores prompts.
      adapters: those beside the model, of which each row uses one or none.
      sampling: of all rows, which ask for nothing else; None if each row has its own.
    """

    capacity: Capacity
    num_drafts: int = 0
    scores_prompts: bool = False
    adapters: SideAdapters | None = None
    sampling: Sampling | None = None

    @property
    def abstract(self) -> Transformer:
        return self.adapters.abstract(self.model) if self.adapters else super().abstract

    @cached_property
    def pages(self) -> Pages:
        """Placements of keys and values, by the same rules as the heads that fill them.

        Memory: 2 layers pages page_size kv_heads head_dim elements in each shard of the batch; in int8 of a byte, with
          a scale for each token of a head in the dtype of the computation.
        """
        model = self.model
        capacity = self.capacity
        a_page = (capacity.page_size, model.kv_heads, model.head_size)
        shape = (capacity.num_shards, model.num_layers, capacity.pages, *a_page)
        placed = self.placed_cache(shape, PAGES_DIMS)
        return Pages(placed, placed)

    @property
    def cache(self) -> PagedCache:
        capacity = self.capacity
        table = self.placed((capacity.num_rows, capacity.pages_of_row), jnp.int32, ("batch", "seq"))
        return PagedCache(*self.pages, None if capacity.whole_prompts else table)  # pyright: ignore[reportArgumentType]

    @property
    def cache_bytes(self) -> int:
        """Bytes of the pages on one device."""
        return sum(placement.local_bytes for placement in jax.tree.leaves(self.pages))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, its keys and its values, on one device."""
        return self.cache_bytes // self.capacity.pages

    @property
    def turn(self) -> Turn:
        """Structs of a turn."""
        return Turn(self.per_row(self.capacity.num_rows), self.per_row(self.capacity.num_rows))

    @property
    def prompts(self) -> TokenChunks:
        """Structs of the chunks of `prefill`, equally many in each shard."""
        return self._chunks(self.capacity.num_chunks, self.capacity.chunk)

    @property
    def drafts(self) -> TokenChunks:
        """Structs of the chunks of `verify`, one in each row: the newest token and its drafts."""
        return self._chunks(self.capacity.num_rows, 1 + self.num_drafts)

    def rows(self, num_rows: int) -> RowArrays:
        """Structs of `RowArrays`."""
        per_row = partial(self.per_row, num_rows)
        table = None if self.capacity.whole_prompts else per_row(self.capacity.pages_of_row)
        if self.sampling is not None:
            return RowArrays(table, RowSampling(rows=per_row()), None, per_row())
        flag = jax.ShapeDtypeStruct((), jnp.bool_, sharding=whole(self.ctx.mesh))
        sampling = RowSampling.structs(per_row, self.most_adjusted, self.model.vocab_size)
        return RowArrays(table, sampling, Asked(flag, flag, flag, flag), per_row())

    @property
    def most_adjusted(self) -> int:
        """The most tokens that a row adjusts."""
        return most_adjusted(self.model.vocab_size, self.capacity.max_len)

    def scores(self, *shape: int) -> TokenScores | None:
        """Structs of `Scores`; None if no row may ask for them."""
        if self.sampling is not None:
            return None
        ranked = min(MOST_RANKED, self.model.vocab_size)
        dtype = jax.eval_shape(wide, jax.ShapeDtypeStruct((), self.ctx.compute_dtype)).dtype
        one, several = self.per_row(*shape, dtype=dtype), self.per_row(*shape, ranked, dtype=dtype)
        return TokenScores(one, self.per_row(*shape, ranked), several)

    def empty_pages(self) -> Pages:
        """Pages of zeros, allocated in shards."""
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), structs(self.pages))

    def compile_prefill(self) -> Callable[..., Any]:
        """(params, chunks, rows, pages) -> (int32[chunks] the token after each chunk, its scores, the pages).

        With `whole_prompts` (params, chunks, rows, None) -> (the same, new pages).
        """
        is_whole = self.capacity.whole_prompts

        def prefill(params: Any, chunks: TokenChunks, rows: RowArrays, pages: Pages | None) -> Stepped:
            if pages is not None:
                return self._step(params, chunks.tokens, _positions(chunks), chunks.lengths - 1, rows, pages)
            # Prompts attend to themselves, so padding must not repeat a position.
            positions = jnp.broadcast_to(jnp.arange(self.capacity.chunk, dtype=jnp.int32), chunks.tokens.shape)
            last, empty = chunks.lengths - 1, self.empty_pages()
            return self._step(params, chunks.tokens, positions, last, rows, empty, kind=EmptyPages)

        num = self.capacity.num_chunks
        pages = structs(self.pages)
        arguments = (structs(self.params), self.prompts, self.rows(num), None if is_whole else pages)
        out = shardings((self.per_row(num), self.scores(num), pages))
        return compile_program(trace(prefill, arguments, out, donate=(3,)))

    def compile_score(self) -> Callable[..., Any]:
        """A prefill that scores the prompt.

        (params, chunks, int32[chunks, chunk] the token that is given after each, or -1, rows, pages) ->
        (int32[chunks, chunk] the token that is sampled after each, the scores of those that are given, or else of those
        that are sampled, the pages).
        """

        def prefill(params: Any, chunks: TokenChunks, given: jax.Array, rows: RowArrays, pages: Pages) -> Stepped:
            each = jnp.broadcast_to(jnp.arange(self.capacity.chunk, dtype=jnp.int32), chunks.tokens.shape)
            return self._step(params, chunks.tokens, _positions(chunks), each, rows, pages, given)

        sizes = (self.capacity.num_chunks, self.capacity.chunk)
        arguments = (
            structs(self.params), self.prompts, self.per_row(*sizes), self.rows(sizes[0]), structs(self.pages),
        )  # fmt: skip
        out = shardings((self.per_row(*sizes), self.scores(*sizes), structs(self.pages)))
        return compile_program(trace(prefill, arguments, out, donate=(4,)))

    def compile_decode(self) -> Callable[..., Any]:
        """(params, turn, rows, pages) -> (the next turn, the scores of its tokens, the pages)."""
        num_rows = self.capacity.num_rows
        arguments = (structs(self.params), self.turn, self.rows(num_rows), structs(self.pages))
        out = shardings((self.turn, self.scores(num_rows), structs(self.pages)))
        return compile_program(trace(self.decode, arguments, out, donate=(3,)))

    def compile_draft(self) -> Callable[..., Any]:
        """(params, turn, rows, pages) -> (int32[batch, num_drafts] the tokens after a turn, the pages)."""
        num_rows = self.capacity.num_rows
        arguments = (structs(self.params), self.turn, self.rows(num_rows), structs(self.pages))
        out = shardings((self.per_row(num_rows, self.num_drafts), structs(self.pages)))
        return compile_program(trace(self.draft, arguments, out, donate=(3,)))

    def draft(self, params: Any, turn: Turn, rows: RowArrays, pages: Pages) -> tuple[jax.Array, Pages]:
        """Several tokens after a turn, and the pages with them."""

        def step(carry: tuple[Turn, Pages], _: None) -> tuple[tuple[Turn, Pages], jax.Array]:
            turn, scores, pages = self.decode(params, carry[0], rows, carry[1])
            del scores
            return (turn, pages), turn.tokens

        # The last step only stores the last draft: if it is accepted, later tokens attend to it.
        (_, pages), drafts = jax.lax.scan(step, (turn, pages), length=self.num_drafts + 1)
        return drafts[:-1].T, pages

    def compile_round(self, smaller: PagedDecoding) -> Callable[..., Any]:
        """A smaller model drafts for a batch and the model checks it, in one program.

        (params, the smaller model's, turn, rows, pages, the smaller model's) -> (int32[batch, num_drafts + 1] the
        model's own tokens, int32[batch] how many drafts are among them, the next turn, both pages).
        """

        def round(params: Any, draft_params: Any, turn: Turn, rows: RowArrays, pages: Pages, draft_pages: Pages) -> Any:
            drafts, draft_pages = smaller.draft(draft_params, turn, rows, draft_pages)
            chunks = jnp.concatenate([turn.tokens[:, None], drafts], axis=1)
            each = jnp.broadcast_to(jnp.arange(1 + self.num_drafts, dtype=jnp.int32), chunks.shape)
            tokens, _, pages = self._step(params, chunks, turn.positions[:, None] + each, each, rows, pages)
            accepted = num_accepted(drafts, tokens)
            newest = jnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0]
            return tokens, accepted, Turn(newest, turn.positions + accepted + 1), pages, draft_pages

        num_rows = self.capacity.num_rows
        held = (structs(self.pages), structs(smaller.pages))
        arguments = (structs(self.params), structs(smaller.params), self.turn, self.rows(num_rows), *held)
        out = shardings((self.per_row(num_rows, 1 + self.num_drafts), self.per_row(num_rows), self.turn, *held))
        return compile_program(trace(round, arguments, out, donate=(4, 5)))

    def compile_verify(self) -> Callable[..., Any]:
        """(params, chunks, rows, pages) -> (int32[batch, num_drafts + 1] the tokens, their scores, the pages)."""

        def verify(params: Any, chunks: TokenChunks, rows: RowArrays, pages: Pages) -> Stepped:
            each = jnp.broadcast_to(jnp.arange(1 + self.num_drafts, dtype=jnp.int32), chunks.tokens.shape)
            return self._step(params, chunks.tokens, _positions(chunks), each, rows, pages)

        num_rows = self.capacity.num_rows
        arguments = (structs(self.params), self.drafts, self.rows(num_rows), structs(self.pages))
        sizes = (num_rows, 1 + self.num_drafts)
        out = shardings((self.per_row(*sizes), self.scores(*sizes), structs(self.pages)))
        return compile_program(trace(verify, arguments, out, donate=(3,)))

    def decode(self, params: Any, turn: Turn, rows: RowArrays, pages: Pages) -> tuple[Turn, TokenScores | None, Pages]:
        """The next turn, the scores of its tokens, and the pages with this one."""
        last = jnp.zeros_like(turn.positions)
        tokens, scores, pages = self._step(params, turn.tokens[:, None], turn.positions[:, None], last, rows, pages)
        if rows.table is None:
            return Turn(tokens, turn.positions + 1), scores, pages
        # Rows without pages stay where they are, and need no further blocks.
        is_decoding = rows.table[:, 0] < self.capacity.pages
        return Turn(tokens, turn.positions + is_decoding.astype(jnp.int32)), scores, pages

    def _step(
        self, params: Any, tokens: jax.Array, positions: jax.Array, last: jax.Array, rows: RowArrays, pages: Pages,
        given: jax.Array | None = None, kind: type[PagedCache] = PagedCache,
    ) -> Stepped:  # fmt: skip
        """Computes tokens of each row, and samples the one after `last`, int32[batch]; or int32[batch, n], several.

        Args:
          given: tokens of the shape of `last`, whose scores are returned; None for those of the sampled ones.
          kind: what the tokens attend to.
        """
        given = jnp.full_like(last, -1) if given is None else given
        batch = {"tokens": tokens, "positions": positions, "last": last, "rows": rows.sampling.rows}
        if self.adapters:
            batch["adapters"] = self.adapters.used(rows.adapters)
        logits, cache = self.logits(params, batch, kind(*pages, rows.table))
        next_positions = jnp.take_along_axis(positions, last.reshape(len(last), -1), axis=1).reshape(last.shape) + 1
        per_row = self.ctx.pspec("batch")
        in_specs = (self.logits_pspec(last), per_row, per_row, per_row, whole(self.ctx.mesh).spec)

        def select(
            logits: jax.Array, positions: jax.Array, given: jax.Array, sampling: RowSampling, asked: Asked | None
        ) -> tuple[jax.Array, TokenScores | None]:
            if positions.ndim == 2:
                sampling = jax.tree.map(lambda x: jnp.repeat(x, positions.shape[1], axis=0), sampling)
            flat = logits.reshape(-1, logits.shape[-1])
            vocab_size = self.model.vocab_size
            if self.sampling is not None:
                chosen = sample(flat, sampling.rows, positions.reshape(-1), self.sampling, vocab_size)
                return chosen.reshape(positions.shape), None
            assert asked is not None
            chosen = sample_each(flat, positions.reshape(-1), sampling, asked, vocab_size)
            scored = jnp.where(given.reshape(-1) < 0, chosen, given.reshape(-1))
            scores = score(flat, scored, asked.scores, vocab_size)
            shape = positions.shape
            return chosen.reshape(shape), jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), scores)

        selected = on_shards(select, self.ctx, in_specs, per_row)
        chosen, scores = selected(logits, next_positions, given, rows.sampling, rows.asked)
        return chosen, scores, Pages(cache.keys, cache.values)

    def _chunks(self, num_rows: int, num_tokens: int) -> TokenChunks:
        return TokenChunks(self.per_row(num_rows, num_tokens), self.per_row(num_rows), self.per_row(num_rows))


def _positions(chunks: TokenChunks) -> jax.Array:
    """The positions of tokens and padding, int32 [batch, chunk]."""
    places = jnp.arange(chunks.tokens.shape[1], dtype=jnp.int32)
    return chunks.begins[:, None] + jnp.minimum(places, chunks.lengths[:, None] - 1)


def num_accepted(drafts_BN: jax.Array, tokens_BM: jax.Array) -> jax.Array:
    """How many first drafts of each row are the model's own tokens."""
    is_own = drafts_BN == tokens_BM[:, : drafts_BN.shape[1]]
    return jnp.cumprod(is_own.astype(jnp.int32), axis=1).sum(1, dtype=jnp.int32)
