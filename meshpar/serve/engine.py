"""Computes the turns of a server: holds the parameters and the pages, and runs the compiled programs on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.mesh.layout import describe_sizes
from meshpar.serve.decoding import Turn
from meshpar.serve.paged_decoding import Chunks, PagedDecoding, Rows
from meshpar.serve.sampling import RowSampling, Sampling
from meshpar.serve.scheduler import Chunk, Plan, Row
from meshpar.train.program import on_host, shardings, structs
from meshpar.tree import human_bytes

GREEDY = Sampling()


class Engine:
    """Compiles both programs, restores the parameters and allocates the pages. Nothing is compiled later.

    Args:
      decoding: model, mesh and sizes.
      restore: structs with shardings -> the parameters.
    """

    def __init__(self, decoding: PagedDecoding, restore: Callable[[Any], Any]):
        self.decoding = decoding
        self._prefill = decoding.compile_prefill()
        self._decode = decoding.compile_decode()
        self._params = restore(structs(decoding.params))
        self._pages = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), structs(decoding.pages))
        self._decoded: tuple[Row | None, ...] = ()
        self._turn: Turn | None = None
        self._rows: Rows | None = None

    def __str__(self) -> str:
        """What is served, in one line."""
        decoding = self.decoding
        capacity = decoding.capacity
        mesh = describe_sizes(dict(decoding.ctx.mesh.shape))
        num_pages = capacity.num_shards * capacity.pages
        pages = f"{num_pages} pages of {capacity.page_size} tokens"
        return f"{mesh}: {capacity.num_rows} slots, {pages}, cache {human_bytes(decoding.cache_bytes)} a device"

    def run(self, plan: Plan) -> tuple[list[int], list[int]]:
        """Computes a turn. Returns the token after each chunk, and the next token of each row; see `Scheduler.advance`.

        A server calls it in a thread. It reads the plan only, which nothing else changes meanwhile.
        """
        first = self._run_prefill(plan.chunks) if any(plan.chunks) else [0] * len(plan.chunks)
        following = self._run_decode(plan.rows) if any(plan.rows) else [0] * len(plan.rows)
        return first, following

    def _run_prefill(self, chunks: Sequence[Chunk | None]) -> list[int]:
        capacity = self.decoding.capacity
        tokens = np.zeros((len(chunks), capacity.chunk), np.int32)
        begins = np.zeros(len(chunks), np.int32)
        lengths = np.ones(len(chunks), np.int32)
        for i, chunk in enumerate(chunks):
            if chunk:
                tokens[i] = np.pad(chunk.tokens, (0, capacity.chunk - len(chunk.tokens)), mode="edge")
                begins[i] = chunk.row.num_cached
                lengths[i] = len(chunk.tokens)
        placed = jax.device_put(Chunks(tokens, begins, lengths), shardings(self.decoding.chunks))
        rows = self._placed_rows([chunk and chunk.row for chunk in chunks])
        found, self._pages = self._prefill(self._params, placed, rows, self._pages)
        return on_host(found).tolist()

    def _run_decode(self, rows: tuple[Row | None, ...]) -> list[int]:
        if rows != self._decoded:  # else the last turn is still on the devices
            self._decoded = rows
            self._turn = self._placed_turn(rows)
            self._rows = self._placed_rows(rows)
        turn, self._pages = self._decode(self._params, self._turn, self._rows, self._pages)
        self._turn = turn
        return on_host(turn.tokens).tolist()

    def _placed_turn(self, rows: Sequence[Row | None]) -> Turn:
        tokens = np.array([row.tokens[-1] if row else 0 for row in rows], np.int32)
        positions = np.array([row.num_cached if row else 0 for row in rows], np.int32)
        return jax.device_put(Turn(tokens, positions), shardings(self.decoding.turn))

    def _placed_rows(self, rows: Sequence[Row | None]) -> Rows:
        """Rows without a request have page 0, and select the most probable token."""
        table = np.zeros((len(rows), self.decoding.capacity.pages_of_row), np.int32)
        for i, row in enumerate(rows):
            if row:
                table[i, : len(row.pages)] = row.pages
        samplings: list[Sampling] = [row.request.sampling if row else GREEDY for row in rows]
        each = RowSampling(
            np.array([how.temperature for how in samplings], np.float32),
            np.array([how.top_k or 0 for how in samplings], np.int32),
            np.array([how.top_p for how in samplings], np.float32),
            np.array([how.seed for how in samplings], np.uint32),
            np.array([row.request.index if row else 0 for row in rows], np.int32),
        )
        draws = np.array(any(how.temperature > 0 for how in samplings))
        return jax.device_put(Rows(table, each, draws), shardings(self.decoding.rows(len(rows))))
