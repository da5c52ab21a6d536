"""Compiles the programs of generation, whatever the model and its cache are.

`prefill` computes chunks of prompts in each shard, `decode` a token of each row, `verify` a token and its drafts, and
`draft` several tokens of each row, one after the other.
Their sizes are fixed, so that no request compiles anything: which request a row belongs to, how many of its tokens are
padding, its pages and how its tokens are sampled are arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.nn.transformer import Batch
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.precision import wide
from meshpar.serve.adjust import most_adjusted
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


class RowArrays(NamedTuple):
    """The arrays of a row that do not change while it is decoded.

    Args:
      table: int32 [batch, pages of a row], see `PagedCache`; None in a batch, where each row is one page.
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


Stepped = tuple[jax.Array, TokenScores | None, Any]
"""The sampled tokens, the scores if rows may ask for them, and the pages with the computed tokens."""


@dataclass(frozen=True, kw_only=True)
class Decoding(ABC):
    """The settings of a generation, from which its programs are compiled before any array exists.

    Args:
      ctx: mesh, rules, lowering and compute dtype; see `for_tokens`.
      capacity: sizes of the batch and of the cache; its shards are those of the batch on the mesh.
      num_drafts: most drafts of a row that `verify` checks; 0 if there are none.
      scores_prompts: whether there is a program that scores prompts.
      sampling: of all rows of a batch that begins together, which ask for nothing else; None if each row has its own.
    """

    ctx: ParallelContext
    capacity: Capacity
    num_drafts: int = 0
    scores_prompts: bool = False
    sampling: Sampling | None = None

    @property
    @abstractmethod
    def params(self) -> Any:
        """Tree of `Placement` of the parameters."""

    @property
    @abstractmethod
    def pages(self) -> Any:
        """Tree of `Placement` of the arrays that a turn writes. Each is donated, and written in place."""

    @property
    @abstractmethod
    def logits_struct(self) -> jax.ShapeDtypeStruct:
        """The logits of a token, [vocab]."""

    @abstractmethod
    def extended(self, params: Any, batch: Batch, rows: RowArrays, pages: Any, is_first: bool) -> tuple[jax.Array, Any]:
        """The logits after the tokens `last` of each row, and the pages with the new tokens; on global arrays.

        Args:
          is_first: whether the tokens are whole prompts, and the pages are empty.
        """

    def check(self, params: Any) -> None:  # noqa: B027 (most models have nothing to check)
        """Checks the model with its parameters, before the first request."""

    @property
    def vocab_size(self) -> int:
        """Token ids of the model."""
        return self.logits_struct.shape[0]

    @property
    def recomputes(self) -> bool:
        """Whether the model has no cache, so that each token needs its whole row again."""
        return False

    @property
    def is_batch(self) -> bool:
        """Whether all prompts begin together: each row is one page, and all are sampled in one way."""
        return self.sampling is not None

    @property
    def logits_ctx(self) -> ParallelContext:
        """The context whose rules shard the logits."""
        return self.ctx

    @property
    def cache_bytes(self) -> int:
        """Bytes of the pages on one device."""
        return sum(placement.local_bytes for placement in jax.tree.leaves(self.pages))

    def per_row(self, num_rows: int, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """The struct of an array [rows, *shape]."""
        sharding = NamedSharding(self.ctx.mesh, self.ctx.pspec("batch"))  # pyright: ignore
        return jax.ShapeDtypeStruct((num_rows, *shape), dtype, sharding=sharding)

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
        table = None if self.is_batch else per_row(self.capacity.pages_of_row)
        if self.sampling is not None:
            return RowArrays(table, RowSampling(rows=per_row()), None, per_row())
        flag = jax.ShapeDtypeStruct((), jnp.bool_, sharding=whole(self.ctx.mesh))
        sampling = RowSampling.structs(per_row, self.most_adjusted, self.vocab_size)
        return RowArrays(table, sampling, Asked(flag, flag, flag, flag), per_row())

    @property
    def most_adjusted(self) -> int:
        """The most tokens that a row adjusts."""
        return most_adjusted(self.vocab_size, self.capacity.max_len)

    def scores(self, *shape: int) -> TokenScores | None:
        """Structs of `Scores`; None if no row may ask for them."""
        if self.sampling is not None:
            return None
        ranked = min(MOST_RANKED, self.vocab_size)
        dtype = jax.eval_shape(wide, self.logits_struct).dtype
        one, several = self.per_row(*shape, dtype=dtype), self.per_row(*shape, ranked, dtype=dtype)
        return TokenScores(one, self.per_row(*shape, ranked), several)

    def empty_pages(self) -> Any:
        """Pages of zeros, allocated in shards."""
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), structs(self.pages))

    def compile_prefill(self) -> Callable[..., Any]:
        """(params, chunks, rows, pages) -> (int32[chunks] the token after each chunk, its scores, the pages).

        Of a batch (params, chunks, rows, None) -> (the same, new pages).
        """

        def prefill(params: Any, chunks: TokenChunks, rows: RowArrays, pages: Any) -> Stepped:
            if pages is not None:
                return self._step(params, chunks.tokens, _positions(chunks), chunks.lengths - 1, rows, pages)
            # Prompts attend to themselves, so padding must not repeat a position.
            last, empty = chunks.lengths - 1, self.empty_pages()
            return self._step(params, chunks.tokens, _places(chunks.tokens), last, rows, empty, is_first=True)

        num = self.capacity.num_chunks
        arguments = (self.prompts, self.rows(num))
        return self._compiled(prefill, arguments, (self.per_row(num), self.scores(num)), makes_pages=self.is_batch)

    def compile_score(self) -> Callable[..., Any]:
        """A prefill that scores the prompt.

        (params, chunks, int32[chunks, chunk] the token that is given after each, or -1, rows, pages) ->
        (int32[chunks, chunk] the token that is sampled after each, the scores of those that are given, or else of those
        that are sampled, the pages).
        """

        def prefill(params: Any, chunks: TokenChunks, given: jax.Array, rows: RowArrays, pages: Any) -> Stepped:
            return self._step(params, chunks.tokens, _positions(chunks), _places(chunks.tokens), rows, pages, given)

        sizes = (self.capacity.num_chunks, self.capacity.chunk)
        arguments = (self.prompts, self.per_row(*sizes), self.rows(sizes[0]))
        return self._compiled(prefill, arguments, (self.per_row(*sizes), self.scores(*sizes)))

    def compile_decode(self) -> Callable[..., Any]:
        """(params, turn, rows, pages) -> (the next turn, the scores of its tokens, the pages)."""
        num_rows = self.capacity.num_rows
        return self._compiled(self.decode, (self.turn, self.rows(num_rows)), (self.turn, self.scores(num_rows)))

    def compile_draft(self) -> Callable[..., Any]:
        """(params, turn, rows, pages) -> (int32[batch, num_drafts] the tokens after a turn, the pages)."""
        num_rows = self.capacity.num_rows
        drafts = self.per_row(num_rows, self.num_drafts)
        return self._compiled(self.draft, (self.turn, self.rows(num_rows)), (drafts,))

    def draft(self, params: Any, turn: Turn, rows: RowArrays, pages: Any) -> tuple[jax.Array, Any]:
        """Several tokens after a turn, and the pages with them."""

        def step(carry: tuple[Turn, Any], _: None) -> tuple[tuple[Turn, Any], jax.Array]:
            turn, scores, pages = self.decode(params, carry[0], rows, carry[1])
            del scores
            return (turn, pages), turn.tokens

        # The last step only stores the last draft: if it is accepted, later tokens attend to it.
        (_, pages), drafts = jax.lax.scan(step, (turn, pages), length=self.num_drafts + 1)
        return drafts[:-1].T, pages

    def compile_round(self, smaller: Decoding) -> Callable[..., Any]:
        """A smaller model drafts for a batch and the model checks it, in one program.

        (params, the smaller model's, turn, rows, pages, the smaller model's) -> (int32[batch, num_drafts + 1] the
        model's own tokens, int32[batch] how many drafts are among them, the next turn, both pages).
        """

        def round(params: Any, draft_params: Any, turn: Turn, rows: RowArrays, pages: Any, draft_pages: Any) -> Any:
            drafts, draft_pages = smaller.draft(draft_params, turn, rows, draft_pages)
            chunks = jnp.concatenate([turn.tokens[:, None], drafts], axis=1)
            each = _places(chunks)
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

        def verify(params: Any, chunks: TokenChunks, rows: RowArrays, pages: Any) -> Stepped:
            return self._step(params, chunks.tokens, _positions(chunks), _places(chunks.tokens), rows, pages)

        sizes = (self.capacity.num_rows, 1 + self.num_drafts)
        arguments = (self.drafts, self.rows(sizes[0]))
        return self._compiled(verify, arguments, (self.per_row(*sizes), self.scores(*sizes)))

    def _compiled(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], results: tuple[Any, ...],
        makes_pages: bool = False,
    ) -> Callable[..., Any]:  # fmt: skip
        """Compiles (params, *arguments, pages) -> (*results, pages)."""
        pages = structs(self.pages)
        given = (structs(self.params), *arguments, None if makes_pages else pages)
        return compile_program(trace(function, given, shardings((*results, pages)), donate=(len(given) - 1,)))

    def decode(self, params: Any, turn: Turn, rows: RowArrays, pages: Any) -> tuple[Turn, TokenScores | None, Any]:
        """The next turn, the scores of its tokens, and the pages with this one."""
        last = jnp.zeros_like(turn.positions)
        tokens, scores, pages = self._step(params, turn.tokens[:, None], turn.positions[:, None], last, rows, pages)
        if rows.table is None:
            return Turn(tokens, turn.positions + 1), scores, pages
        # Rows without pages stay where they are, and need no further blocks.
        is_decoding = rows.table[:, 0] < self.capacity.pages
        return Turn(tokens, turn.positions + is_decoding.astype(jnp.int32)), scores, pages

    def _step(
        self, params: Any, tokens: jax.Array, positions: jax.Array, last: jax.Array, rows: RowArrays, pages: Any,
        given: jax.Array | None = None, is_first: bool = False,
    ) -> Stepped:  # fmt: skip
        """Computes tokens of each row, and samples the one after `last`, int32[batch]; or int32[batch, n], several.

        Args:
          given: tokens of the shape of `last`, whose scores are returned; None for those of the sampled ones.
          is_first: see `extended`.
        """
        given = jnp.full_like(last, -1) if given is None else given
        batch = {"tokens": tokens, "positions": positions, "last": last, "rows": rows.sampling.rows}
        logits, pages = self.extended(params, batch, rows, pages, is_first)
        next_positions = jnp.take_along_axis(positions, last.reshape(len(last), -1), axis=1).reshape(last.shape) + 1
        per_row = self.ctx.pspec("batch")
        in_specs = (self.logits_pspec(last), per_row, per_row, per_row, whole(self.ctx.mesh).spec)

        def select(
            logits: jax.Array, positions: jax.Array, given: jax.Array, sampling: RowSampling, asked: Asked | None
        ) -> tuple[jax.Array, TokenScores | None]:
            if positions.ndim == 2:
                sampling = jax.tree.map(lambda x: jnp.repeat(x, positions.shape[1], axis=0), sampling)
            flat = logits.reshape(-1, logits.shape[-1])
            vocab_size = self.vocab_size
            if self.sampling is not None:
                chosen = sample(flat, sampling.rows, positions.reshape(-1), self.sampling, vocab_size)
                return chosen.reshape(positions.shape), None
            assert asked is not None
            chosen = sample_each(flat, positions.reshape(-1), sampling, asked, vocab_size)
            scored = jnp.where(given.reshape(-1) < 0, chosen, given.reshape(-1))
            scores = score(flat, scored, asked.scores, vocab_size)
            shape = positions.shape
            return chosen.reshape(shape), jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), scores)

        selected = on_shards(select, self.logits_ctx, in_specs, per_row)
        chosen, scores = selected(logits, next_positions, given, rows.sampling, rows.asked)
        return chosen, scores, pages

    def logits_pspec(self, last: jax.Array) -> PartitionSpec:
        """The sharding of the logits after one token or after several tokens of each row."""
        dims = ("batch", "vocab") if last.ndim == 1 else ("batch", "seq", "vocab")
        return self.logits_ctx.pspec(*dims)

    def _chunks(self, num_rows: int, num_tokens: int) -> TokenChunks:
        return TokenChunks(self.per_row(num_rows, num_tokens), self.per_row(num_rows), self.per_row(num_rows))


def _places(tokens: jax.Array) -> jax.Array:
    """The place of each token in its chunk, int32 [batch, chunk]."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


def _positions(chunks: TokenChunks) -> jax.Array:
    """The positions of tokens and padding, int32 [batch, chunk]."""
    places = jnp.arange(chunks.tokens.shape[1], dtype=jnp.int32)
    return chunks.begins[:, None] + jnp.minimum(places, chunks.lengths[:, None] - 1)


def num_accepted(drafts_BN: jax.Array, tokens_BM: jax.Array) -> jax.Array:
    """How many first drafts of each row are the model's own tokens."""
    is_own = drafts_BN == tokens_BM[:, : drafts_BN.shape[1]]
    return jnp.cumprod(is_own.astype(jnp.int32), axis=1).sum(1, dtype=jnp.int32)
