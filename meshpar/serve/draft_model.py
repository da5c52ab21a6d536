"""A smaller model that drafts for a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshpar.serve.decoding import Decoding, RowArrays, Turn
from meshpar.serve.paged_model import PagedModel
from meshpar.serve.scheduler import Row
from meshpar.train.program import on_host


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
