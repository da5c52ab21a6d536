"""Computes the turns of a server: runs the compiled programs on the parameters and the pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from meshpar.serve.decoding import Decoding, RowArrays, Turn
from meshpar.serve.drafts import Drafter, accepted
from meshpar.serve.paged_model import DraftModel, PagedModel, rows_of
from meshpar.serve.scheduler import Chunk, Computed, Row, TurnPlan
from meshpar.serve.scores import TokenScore, TokenScores
from meshpar.train.program import on_host


class Engine(PagedModel):
    """The model that a server serves.

    Args:
      decoding: model, mesh and sizes.
      restore: structs with shardings -> the parameters.
      drafter: proposes tokens, which are checked together; None to decode one token of each row at a time.
    """

    def __init__(self, decoding: Decoding, restore: Callable[[Any], Any], drafter: Drafter | None = None):
        assert decoding.num_drafts == (drafter.num_drafts if drafter else 0), "drafts of another length are compiled"
        self._decode = None if decoding.recomputes else decoding.compile_decode()
        # A batch needs the host only to read its tokens, so a draft and its check are one program.
        smaller = drafter.decoding if decoding.is_batch and isinstance(drafter, DraftModel) else None
        self._round = decoding.compile_round(smaller) if smaller else None
        self._verify = decoding.compile_verify() if drafter and not smaller else None
        self._score = decoding.compile_score() if decoding.scores_prompts else None
        super().__init__(decoding, restore)
        decoding.check(self._params)
        self.drafter = drafter
        self._decoded: tuple[Row | None, ...] = ()
        self._rows: RowArrays | None = None
        self._turn: Turn | None = None
        self._ahead: tuple[Turn, TokenScores | None] | None = None

    def __str__(self) -> str:
        return str(self.decoding)

    def load(self, params: Any) -> None:
        """Replaces the parameters. No row may be running, and pages of earlier ones must not be used again."""
        self._params = params
        self._decoded, self._rows, self._turn, self._ahead = (), None, None, None

    def run(self, plan: TurnPlan) -> Computed:
        """Computes a turn.

        A server calls it in a thread. It reads the plan only, which nothing else changes meanwhile.
        """
        assert not (self.decoding.is_batch and any(plan.chunks) and any(plan.rows)), "prompts of a batch begin together"
        if self.decoding.recomputes:
            return self._recompute(plan)
        first, scores = self._run_prompts(plan.chunks) if any(plan.chunks) else ([0] * len(plan.chunks), {})
        if not any(plan.rows):
            return Computed(first, [[]] * len(plan.rows), chunk_scores=scores)
        if plan.rows != self._decoded and not self._goes_on(plan):
            self._decoded = plan.rows
            self._rows = self._placed_rows(plan.rows)
            self._turn = self._ahead = None
        elif any(map(_depends_on_answer, plan.rows)):
            self._rows = self._placed_rows(plan.rows)
        if self._round:
            return Computed(first, *self._run_round(plan.rows))
        drafts = self.drafter.propose(plan.rows) if self.drafter else []
        # A penalty or a grammar depends on the token before, so these rows get one token at a time.
        drafts = [[] if _depends_on_answer(row) else draft for row, draft in zip(plan.rows, drafts, strict=False)]
        following, of_rows = self._run_verify(plan.rows, drafts) if any(drafts) else self._run_decode(plan.rows)
        return Computed(first, following, sum(map(len, drafts)), scores, _read_scores(plan.rows, of_rows, following))

    def _recompute(self, plan: TurnPlan) -> Computed:
        """A turn of a model without a cache, which computes the whole row of every token."""
        chunks = [row and Chunk(row, row.tokens) for row in plan.rows]
        found, scores = self._run_prompts([whole or chunk for whole, chunk in zip(chunks, plan.chunks, strict=True)])
        following = [[token] if row else [] for token, row in zip(found, plan.rows, strict=True)]
        return Computed(found, following, chunk_scores=scores, scores=scores)

    def _goes_on(self, plan: TurnPlan) -> bool:
        """Whether only rows of a batch have ended: they are computed with the others, for no row takes their pages."""
        if not self.decoding.is_batch or not self._decoded:
            return False
        return all(row is None or row is before for row, before in zip(plan.rows, self._decoded, strict=True))

    def _run_prompts(self, chunks: Sequence[Chunk | None]) -> tuple[list[int], dict[int, list[TokenScore]]]:
        """The token after each chunk, and the scores that are asked for.

        They are those of the token after each of the chunk's if a prompt is scored, else of the token after the chunk.
        """
        scores_prompt = any(chunk.row.request.scores_prompt for chunk in chunks if chunk)
        first, scores = self._run_score(chunks) if scores_prompt else self.prefill(chunks)
        if self.drafter:
            self.drafter.prefill(chunks)
        scored = [chunk.tokens if chunk and scores_prompt else [0] for chunk in chunks]
        return first, _read_scores(rows_of(chunks), scores, scored)

    def _run_score(self, chunks: Sequence[Chunk | None]) -> tuple[list[int], TokenScores | None]:
        assert self._score
        given = np.full((len(chunks), self.decoding.capacity.chunk), -1, np.int32)
        for i, chunk in enumerate(chunks):
            if chunk:
                first = chunk.row.num_cached + 1
                following = chunk.row.request.prompt[first : first + len(chunk.tokens)]
                given[i, : len(following)] = following
        placed = jax.device_put(given, self.decoding.per_row(*given.shape).sharding)
        prompts, rows = self._placed_chunks(chunks, self.decoding.prompts), self._placed_rows(rows_of(chunks))
        found, scores, self._pages = self._score(self._params, prompts, placed, rows, self._pages)
        lasts = [len(chunk.tokens) - 1 if chunk else 0 for chunk in chunks]
        return on_host(found)[range(len(lasts)), lasts].tolist(), scores

    def _run_decode(self, rows: Sequence[Row | None]) -> tuple[list[list[int]], TokenScores | None]:
        # If the same rows were decoded in the last turn, it is still on the devices.
        turn, scores = self._ahead or self._decoded_turn(self._turn or self._placed_turn(rows))
        self._turn, self._ahead = turn, None
        # A batch decodes the same rows again, so that their next turn is computed while this one is read.
        is_known = self.decoding.is_batch and self.drafter is None
        if is_known and not any(map(_depends_on_answer, rows)) and any(row.num_missing > 1 for row in rows if row):
            self._ahead = self._decoded_turn(turn)
        return on_host(turn.tokens)[:, None].tolist(), scores

    def _decoded_turn(self, turn: Turn) -> tuple[Turn, TokenScores | None]:
        assert self._decode
        following, scores, self._pages = self._decode(self._params, turn, self._rows, self._pages)
        return following, scores

    def _run_round(self, rows: Sequence[Row | None]) -> tuple[list[list[int]], int]:
        """The tokens that are added to each row, and the number of drafts that its answer had room for."""
        assert self._round and self._rows and isinstance(self.drafter, DraftModel)
        turn = self._turn or self._placed_turn(rows)
        found = self.drafter.check(self._round, self._params, turn, self._rows, self._pages)
        tokens, num_accepted, self._turn, self._pages = found
        tokens, num_accepted = (x.tolist() for x in on_host((tokens, num_accepted)))
        rooms = [row.num_missing if row else 0 for row in rows]
        following = [new[: min(room, num + 1)] for new, num, room in zip(tokens, num_accepted, rooms, strict=True)]
        return following, sum(min(room - 1, self.decoding.num_drafts) for room in rooms if room)

    def _run_verify(
        self, rows: Sequence[Row | None], drafts: Sequence[Sequence[int]]
    ) -> tuple[Any, TokenScores | None]:
        """Computes the newest token of each row and its drafts. Returns the accepted ones, and the token after them."""
        assert self._verify
        chunks = [row and Chunk(row, [row.tokens[-1], *draft]) for row, draft in zip(rows, drafts, strict=True)]
        placed = self._placed_chunks(chunks, self.decoding.drafts)
        found, scores, self._pages = self._verify(self._params, placed, self._rows, self._pages)
        self._turn = None
        return list(map(accepted, drafts, on_host(found).tolist())), scores


def _depends_on_answer(row: Row | None) -> bool:
    """Whether what is drawn depends on the answer so far in another way than by the model."""
    if row is None:
        return False
    adjustment = row.request.adjustment
    return row.request.constraint is not None or (adjustment is not None and adjustment.changes)


def _read_scores(
    rows: Sequence[Row | None], scores: TokenScores | None, tokens: Sequence[Sequence[int]]
) -> dict[int, list[TokenScore]]:  # fmt: skip
    """Index of a row that asks for scores -> those of its tokens."""
    asking = [i for i, row in enumerate(rows) if row and row.request.scores]
    if not asking or scores is None:
        return {}
    several = on_host(scores.logprob).reshape(len(rows), -1)
    logprob = several.tolist()
    ids, logprobs = (on_host(x).reshape(*several.shape, -1).tolist() for x in scores[1:])
    return {i: [TokenScore(logprob[i][k], ids[i][k], logprobs[i][k]) for k in range(len(tokens[i]))] for i in asking}
