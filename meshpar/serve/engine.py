"""Computes the turns of a server: runs the compiled programs on the parameters and the pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshpar.mesh.layout import describe_sizes
from meshpar.serve.decoding import Turn
from meshpar.serve.drafts import Drafter, accepted
from meshpar.serve.paged_decoding import PagedDecoding, Rows
from meshpar.serve.paged_model import PagedModel
from meshpar.serve.scheduler import Computed, Plan, Row
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

    def run(self, plan: Plan) -> Computed:
        """Computes a turn.

        A server calls it in a thread. It reads the plan only, which nothing else changes meanwhile.
        """
        first = [0] * len(plan.chunks)
        if any(plan.chunks):
            first = self.prefill(plan.chunks)
            if self.drafter:
                self.drafter.prefill(plan.chunks)
        if not any(plan.rows):
            return Computed(first, [[]] * len(plan.rows))
        if plan.rows != self._decoded:
            self._decoded = plan.rows
            self._rows = self._placed_rows(plan.rows)
            self._turn = None
        drafts = self.drafter.propose(plan.rows) if self.drafter else []
        following = self._run_verify(plan.rows, drafts) if any(drafts) else self._run_decode(plan.rows)
        return Computed(first, following, sum(map(len, drafts)))

    def _run_decode(self, rows: Sequence[Row | None]) -> list[list[int]]:
        # If the same rows were decoded in the last turn, it is still on the devices.
        turn, self._pages = self._decode(self._params, self._turn or self._placed_turn(rows), self._rows, self._pages)
        self._turn = turn
        return on_host(turn.tokens)[:, None].tolist()

    def _run_verify(self, rows: Sequence[Row | None], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Computes the newest token of each row and its drafts. Returns the accepted ones, and the token after them."""
        assert self._verify
        tokens = [[row.tokens[-1], *draft] if row else [0] for row, draft in zip(rows, drafts, strict=True)]
        placed = self._placed_chunks(rows, tokens, self.decoding.drafts)
        found, self._pages = self._verify(self._params, placed, self._rows, self._pages)
        self._turn = None
        return list(map(accepted, drafts, on_host(found).tolist()))
