"""Models on the devices, as a server uses them: parameters, pages, and compiled programs of prompts and of drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from meshpar.serve.adjust import NOTHING
from meshpar.serve.decoding import Decoding, RowArrays, TokenChunks, Turn
from meshpar.serve.sampling import Asked, RowSampling, Sampling, num_words
from meshpar.serve.scheduler import Chunk, Row
from meshpar.serve.scores import TokenScores
from meshpar.train.program import on_host, shardings, structs

GREEDY = Sampling()


class PagedModel:
    """Compiles its programs, restores the parameters and allocates the pages. Nothing is compiled later.

    Args:
      decoding: model, mesh and sizes.
      restore: structs with shardings -> the parameters.
    """

    def __init__(self, decoding: Decoding, restore: Callable[[Any], Any]):
        self.decoding = decoding
        self._prefill = decoding.compile_prefill()
        self._params = restore(structs(decoding.params))
        self._pages = None if decoding.is_batch else decoding.empty_pages()

    def prefill(self, chunks: Sequence[Chunk | None]) -> tuple[list[int], TokenScores | None]:
        """Computes chunks of prompts. Returns the token after each, and its scores."""
        if self.decoding.is_batch:
            self._pages = None  # those of the batch before
        placed = self._placed_chunks(chunks, self.decoding.prompts), self._placed_rows(rows_of(chunks))
        found, scores, self._pages = self._prefill(self._params, *placed, self._pages)
        return on_host(found).tolist(), scores

    def _placed_chunks(self, chunks: Sequence[Chunk | None], structs: TokenChunks) -> TokenChunks:
        """Tokens that follow the cached ones of each row."""
        size = structs.tokens.shape[1]
        each = [chunk.tokens if chunk else [0] for chunk in chunks]
        padded = np.array([[*tokens, *[tokens[-1]] * (size - len(tokens))] for tokens in each], np.int32)
        has_cache = not self.decoding.recomputes
        begins = np.array([chunk.row.num_cached if chunk and has_cache else 0 for chunk in chunks], np.int32)
        lengths = np.array([len(tokens) for tokens in each], np.int32)
        return jax.device_put(TokenChunks(padded, begins, lengths), shardings(structs))

    def _placed_turn(self, rows: Sequence[Row | None]) -> Turn:
        """The newest token of each row."""
        tokens = np.array([row.tokens[-1] if row else 0 for row in rows], np.int32)
        positions = np.array([row.num_cached if row else 0 for row in rows], np.int32)
        return jax.device_put(Turn(tokens, positions), shardings(self.decoding.turn))

    def _placed_rows(self, rows: Sequence[Row | None]) -> RowArrays:
        """Rows without a request have no pages, and are decoded greedily."""
        table = None if self.decoding.is_batch else self._table(rows)
        each, asked = self._sampling(rows)
        adapters = np.array([row.request.adapter if row else 0 for row in rows], np.int32)
        return jax.device_put(RowArrays(table, each, asked, adapters), shardings(self.decoding.rows(len(rows))))

    def _table(self, rows: Sequence[Row | None]) -> np.ndarray:
        capacity = self.decoding.capacity
        table = np.full((len(rows), capacity.pages_of_row), capacity.pages, np.int32)
        for i, row in enumerate(rows):
            if row:
                table[i, : len(row.pages)] = row.pages
        return table

    def _sampling(self, rows: Sequence[Row | None]) -> tuple[RowSampling, Asked | None]:
        """What the programs are given of how each row is sampled."""
        decoding = self.decoding
        if decoding.sampling is None:
            return sampling_of(rows, decoding.most_adjusted, decoding.vocab_size)
        assert all(row.request.sampling == decoding.sampling for row in rows if row), "another sampling is compiled"
        return RowSampling(rows=np.array([row.request.index if row else 0 for row in rows], np.int32)), None


class DraftModel(PagedModel):
    """A smaller model with the same vocabulary, as a `Drafter`. Its pages have the numbers of the larger model's pages.

    It samples with the same noise, so that it draws the same token more often.

    Args:
      decoding: its settings, with the capacity and the mesh of the larger model.
      restore: structs with shardings -> its parameters.

    Memory: its parameters, and as many pages as the larger model has.

    Source: Leviathan et al. 2023, arXiv:2211.17192; see also `drafts`.
    """

    def __init__(self, decoding: Decoding, restore: Callable[[Any], Any]):
        self._draft = None if decoding.is_batch else decoding.compile_draft()
        super().__init__(decoding, restore)

    @property
    def num_drafts(self) -> int:
        """See `Drafter.num_drafts`."""
        return self.decoding.num_drafts

    def propose(self, rows: Sequence[Row | None]) -> list[list[int]]:
        """See `Drafter.propose`."""
        assert self._draft, "a batch is drafted and checked by one program, see `check`"
        turn = self._placed_turn(rows)
        drafts, self._pages = self._draft(self._params, turn, self._placed_rows(rows), self._pages)
        found = on_host(drafts).tolist()
        return [draft[: row.num_missing - 1] if row else [] for row, draft in zip(rows, found, strict=True)]

    def check(self, compiled: Callable[..., Any], params: Any, turn: Turn, rows: RowArrays, pages: Any) -> Any:
        """Runs `compile_round` of the larger model. Returns its tokens, the accepted drafts, the turn and its pages."""
        tokens, num_accepted, turn, pages, self._pages = compiled(params, self._params, turn, rows, pages, self._pages)
        return tokens, num_accepted, turn, pages


def rows_of(chunks: Sequence[Chunk | None]) -> list[Row | None]:
    return [chunk and chunk.row for chunk in chunks]


def sampling_of(rows: Sequence[Row | None], most_adjusted: int, vocab_size: int) -> tuple[RowSampling, Asked]:
    """How the next token of each row is sampled, as arrays on the host."""
    hows: list[Sampling] = [row.request.sampling or GREEDY if row else GREEDY for row in rows]
    adjusted = np.zeros((len(rows), most_adjusted), np.int32)
    added = np.zeros((len(rows), most_adjusted), np.float32)
    factors = np.ones_like(added)
    allowed = np.full((len(rows), num_words(vocab_size)), -1, np.int32)
    requests = [(i, row, row.request) for i, row in enumerate(rows) if row]
    adjusts = False
    for i, row, request in requests:
        changes = (request.adjustment or NOTHING).of(request.prompt, row.answer)
        adjusts |= bool(changes)
        adjusted[i, : len(changes)] = list(changes)
        factors[i, : len(changes)] = [change.factor for change in changes.values()]
        added[i, : len(changes)] = [change.added for change in changes.values()]
        if request.constraint:
            allowed[i] = request.constraint.allowed(row.answer)
    arrays = RowSampling(
        temperature=np.array([how.temperature for how in hows], np.float32),
        top_k=np.array([how.top_k or 0 for how in hows], np.int32),
        top_p=np.array([how.top_p for how in hows], np.float32),
        min_p=np.array([how.min_p for how in hows], np.float32),
        seed=np.array([how.seed for how in hows], np.uint32),
        rows=np.array([row.request.index if row else 0 for row in rows], np.int32),
        adjusted=adjusted, factors=factors, added=added, allowed=allowed,
    )  # fmt: skip
    draws = any(how.temperature > 0 for how in hows)
    scores = any(request.scores for *_, request in requests)
    limits = any(request.constraint for *_, request in requests)
    return arrays, Asked(*map(np.array, (draws, adjusts, scores, limits)))
