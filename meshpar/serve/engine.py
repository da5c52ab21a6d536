"""Computes the turns of a server: runs the compiled programs on the parameters and the pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from meshpar.mesh.layout import describe_sizes
from meshpar.serve.decoding import Turn
from meshpar.serve.drafts import Drafter, accepted
from meshpar.serve.paged_decoding import PagedDecoding, Rows
from meshpar.serve.paged_model import PagedModel
from meshpar.serve.scheduler import Chunk, Computed, Plan, Row
from meshpar.serve.scores import Score, Scores
from meshpar.train.program import on_host
from meshpar.tree import human_bytes


class Engine(PagedModel):
    """The model that a server serves.

    Args:
      decoding: model, mesh and sizes.
      restore: structs with shardings -> the parameters.
      drafter: proposes tokens, which are checked together; None to decode one token of each row at a time.
    """

    def __init__(self, decoding: PagedDecoding, restore: Callable[[Any], Any], drafter: Drafter | None = None):
        assert decoding.num_drafts == (drafter.num_drafts if drafter else 0), "drafts of another length are compiled"
        self._decode = decoding.compile_decode()
        self._verify = decoding.compile_verify() if drafter else None
        self._score = decoding.compile_score() if decoding.scores_prompts else None
        super().__init__(decoding, restore)
        self.drafter = drafter
        self._decoded: tuple[Row | None, ...] = ()
        self._rows: Rows | None = None
        self._turn: Turn | None = None

    def __str__(self) -> str:
        """What is served, in one line."""
        decoding = self.decoding
        capacity = decoding.capacity
        mesh = describe_sizes(dict(decoding.ctx.mesh.shape))
        num_pages = capacity.num_shards * capacity.pages
        pages = f"{num_pages} pages of {capacity.page_size} tokens"
        drafts = f", {decoding.num_drafts} drafts a row" if decoding.num_drafts else ""
        return f"{mesh}: {capacity.num_rows} slots, {pages}, cache {human_bytes(decoding.cache_bytes)} a device{drafts}"

    @property
    def vocab_size(self) -> int:
        """Token ids of the model."""
        return self.decoding.model.vocab_size

    def load(self, params: Any) -> None:
        """Replaces the parameters. No row may be running, and pages of earlier ones must not be used again."""
        self._params = params
        self._decoded, self._rows, self._turn = (), None, None

    def run(self, plan: Plan) -> Computed:
        """Computes a turn.

        A server calls it in a thread. It reads the plan only, which nothing else changes meanwhile.
        """
        first, scores = self._run_prompts(plan.chunks) if any(plan.chunks) else ([0] * len(plan.chunks), {})
        if not any(plan.rows):
            return Computed(first, [[]] * len(plan.rows), chunk_scores=scores)
        if plan.rows != self._decoded:
            self._decoded = plan.rows
            self._rows = self._placed_rows(plan.rows)
            self._turn = None
        elif any(map(_depends_on_answer, plan.rows)):
            self._rows = self._placed_rows(plan.rows)
        drafts = self.drafter.propose(plan.rows) if self.drafter else []
        # A penalty or a grammar depends on the token before, so these rows get one token at a time.
        drafts = [[] if _depends_on_answer(row) else draft for row, draft in zip(plan.rows, drafts, strict=False)]
        following, of_rows = self._run_verify(plan.rows, drafts) if any(drafts) else self._run_decode(plan.rows)
        return Computed(first, following, sum(map(len, drafts)), scores, _read_scores(plan.rows, of_rows, following))

    def _run_prompts(self, chunks: Sequence[Chunk | None]) -> tuple[list[int], dict[int, list[Score]]]:
        """The token after each chunk, and the scores that are asked for.

        They are those of the token after each of the chunk's if a prompt is scored, else of the token after the chunk.
        """
        scores_prompt = any(chunk.row.request.scores_prompt for chunk in chunks if chunk)
        first, scores = self._run_score(chunks) if scores_prompt else self.prefill(chunks)
        if self.drafter:
            self.drafter.prefill(chunks)
        rows = [chunk and chunk.row for chunk in chunks]
        scored = [chunk.tokens if chunk and scores_prompt else [0] for chunk in chunks]
        return first, _read_scores(rows, scores, scored)

    def _run_score(self, chunks: Sequence[Chunk | None]) -> tuple[list[int], Scores]:
        assert self._score
        rows = [chunk and chunk.row for chunk in chunks]
        given = np.full((len(chunks), self.decoding.capacity.chunk), -1, np.int32)
        for i, chunk in enumerate(chunks):
            if chunk:
                first = chunk.row.num_cached + 1
                following = chunk.row.request.prompt[first : first + len(chunk.tokens)]
                given[i, : len(following)] = following
        placed = jax.device_put(given, self.decoding.per_row(*given.shape).sharding)
        arguments = (self._placed_prompts(chunks), placed, self._placed_rows(rows))
        found, scores, self._pages = self._score(self._params, *arguments, self._pages)
        sampled = on_host(found)
        lasts = [len(chunk.tokens) - 1 if chunk else 0 for chunk in chunks]
        return [int(sampled[i, last]) for i, last in enumerate(lasts)], scores

    def _run_decode(self, rows: Sequence[Row | None]) -> tuple[list[list[int]], Scores]:
        # If the same rows were decoded in the last turn, it is still on the devices.
        turn = self._turn or self._placed_turn(rows)
        turn, scores, self._pages = self._decode(self._params, turn, self._rows, self._pages)
        self._turn = turn
        return on_host(turn.tokens)[:, None].tolist(), scores

    def _run_verify(self, rows: Sequence[Row | None], drafts: Sequence[Sequence[int]]) -> tuple[Any, Scores]:
        """Computes the newest token of each row and its drafts. Returns the accepted ones, and the token after them."""
        assert self._verify
        tokens = [[row.tokens[-1], *draft] if row else [0] for row, draft in zip(rows, drafts, strict=True)]
        placed = self._placed_chunks(rows, tokens, self.decoding.drafts)
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
    rows: Sequence[Row | None], scores: Scores, tokens: Sequence[Sequence[int]]
) -> dict[int, list[Score]]:  # fmt: skip
    """Index of a row that asks for scores -> those of its tokens."""
    asking = [i for i, row in enumerate(rows) if row and row.request.scores]
    if not asking:
        return {}
    several = on_host(scores.logprob).reshape(len(rows), -1)
    logprob = several.tolist()
    ids, logprobs = (on_host(x).reshape(*several.shape, -1).tolist() for x in scores[1:])
    return {i: [Score(logprob[i][k], ids[i][k], logprobs[i][k]) for k in range(len(tokens[i]))] for i in asking}
