"""Runs a user's own causal model: the engine of `generate` and of a server, as `engine` is of meshpar's decoders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.errors import ConfigError
from meshpar.interop.causal import decoded_by, empty_cache, logits_of_row
from meshpar.mesh.layout import describe_sizes
from meshpar.parallel.context import tracing
from meshpar.parallel.precision import computed_in
from meshpar.serve.own_model import OwnDecoding
from meshpar.serve.paged_model import sampling_of
from meshpar.serve.sampling import Asked, RowSampling
from meshpar.serve.scheduler import Chunk, Computed, Row, TurnPlan
from meshpar.train.program import on_host, shardings, structs
from meshpar.tree import human_bytes

CHECKED = 6
"""Tokens whose logits with a cache are compared with those without one."""


class OwnEngine:
    """A user's model on the devices. `Scheduler` decides which rows it computes.

    Args:
      decoding: model, mesh and sizes.
      restore: structs with shardings -> the parameters.

    Raises:
      ConfigError: the logits with the model's cache are not those without it.
    """

    def __init__(self, decoding: OwnDecoding, restore: Callable[[Any], Any]):
        self.decoding = decoding
        self._recompute = self._extend = self._decode = None
        if decoding.model.decoding is None:
            self._recompute = decoding.compile_recomputing()
        else:
            self._extend = decoding.compile_decoding(decoding.capacity.chunk)
            self._decode = decoding.compile_decoding(1)
        self._params = restore(structs(decoding.params))
        zeros = partial(jax.tree.map, lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding))
        self._cache = zeros(structs(decoding.cache))
        if decoding.model.decoding is not None:
            _check_cache(decoding, self._params)

    def __str__(self) -> str:
        """What is served, in one line."""
        decoding = self.decoding
        mesh = describe_sizes(dict(decoding.ctx.mesh.shape))
        cache = f", cache {human_bytes(decoding.cache_bytes)} a device" if decoding.cache_bytes else ""
        return f"{mesh}: {decoding.capacity.num_rows} slots{cache}; {decoding.model.how}"

    @property
    def vocab_size(self) -> int:
        """Token ids of the model."""
        return self.decoding.vocab_size

    def run(self, plan: TurnPlan) -> Computed:
        """Computes a turn."""
        chunks = {chunk.row.slot: chunk for chunk in plan.chunks if chunk}
        if self._recompute:
            ending = {slot: chunk.row for slot, chunk in chunks.items() if _is_last(chunk)}
            rows = [row or ending.get(slot) for slot, row in enumerate(plan.rows)]
            found = self._recomputed(rows) if any(rows) else [0] * len(rows)
        else:
            found = self._extended(chunks) if chunks else [0] * len(plan.rows)
        first = [found[chunk.row.slot] if chunk else 0 for chunk in plan.chunks]
        if not self._recompute and any(plan.rows):
            found = self._decoded(plan.rows)
        return Computed(first, [[found[slot]] if row else [] for slot, row in enumerate(plan.rows)])

    def _recomputed(self, rows: Sequence[Row | None]) -> list[int]:
        tokens = np.zeros((len(rows), self.decoding.capacity.max_len), np.int32)
        for i, row in enumerate(rows):
            if row:
                tokens[i, : len(row.tokens)] = row.tokens
        lengths = np.array([len(row.tokens) if row else 1 for row in rows], np.int32)
        assert self._recompute
        return self._read(self._recompute(self._params, *self._placed(tokens, lengths), *self._sampling(rows)))

    def _extended(self, chunks: dict[int, Chunk]) -> list[int]:
        size = self.decoding.capacity.chunk
        num_rows = self.decoding.capacity.num_rows
        tokens = np.zeros((num_rows, size), np.int32)
        for slot, chunk in chunks.items():
            tokens[slot, : len(chunk.tokens)] = chunk.tokens
        counts = [len(chunks[slot].tokens) if slot in chunks else 0 for slot in range(num_rows)]
        rows = [chunks[slot].row if slot in chunks else None for slot in range(num_rows)]
        return self._cached(self._extend, rows, tokens, counts)

    def _decoded(self, rows: Sequence[Row | None]) -> list[int]:
        tokens = np.array([[row.tokens[-1] if row else 0] for row in rows], np.int32)
        return self._cached(self._decode, rows, tokens, [int(row is not None) for row in rows])

    def _cached(self, program: Any, rows: Sequence[Row | None], tokens: np.ndarray, counts: Sequence[int]) -> list[int]:
        begins = np.array([row.num_cached if row else 0 for row in rows], np.int32)
        placed = self._placed(tokens, np.array(counts, np.int32), begins)
        found, self._cache = program(self._params, self._cache, *placed, *self._sampling(rows))
        return self._read(found)

    def _placed(self, *arrays: np.ndarray) -> list[jax.Array]:
        sharding = self.decoding.per_row().sharding
        return [jax.device_put(x, sharding) for x in arrays]

    def _sampling(self, rows: Sequence[Row | None]) -> tuple[RowSampling, Asked]:
        of_rows = sampling_of(rows, self.decoding.most_adjusted, self.decoding.vocab_size)
        return jax.device_put(of_rows, shardings((self.decoding.rows(), self.decoding.asked)))

    def _read(self, tokens: jax.Array) -> list[int]:
        return on_host(tokens).tolist()


def _is_last(chunk: Chunk) -> bool:
    return chunk.row.num_cached + len(chunk.tokens) == len(chunk.row.request.prompt)


def _check_cache(decoding: OwnDecoding, params: Any) -> None:
    """Compares the logits of a few tokens with and without the cache; a stale or partial cache changes them.

    Raises:
      ConfigError: they differ by more than rounding.
    """
    length = min(CHECKED, decoding.capacity.max_len)
    tokens = jnp.arange(length, dtype=jnp.int32) * 7 % decoding.vocab_size
    with tracing(replace(decoding.ctx, manual=False)):
        both = jax.jit(partial(_both, decoding)).trace(params, tokens)
    cached, whole = (np.float64(x) for x in on_host(both.lower().compile()(params, tokens)))
    allowed = 100 * float(jnp.finfo(decoding.logits_dtype).eps) * max(np.abs(whole).max(), 1.0)
    differences = np.abs(cached - whole).max(-1)
    wrong = ~(differences <= allowed)  # also what is no number
    if wrong.any():
        at = int(np.argmax(wrong))
        what = "with its cache the model has other logits than without it"
        fix = "mend its positions, its mask or what it stores; or CausalModel.of(..., cache=False) recomputes each row"
        raise ConfigError(f"{what}: at token {at} they differ by {differences[at]:.2g}; {fix}")


def _both(decoding: OwnDecoding, params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logits [seq, vocab] of a row, with the cache and without it."""
    model = decoding.model
    params = jax.tree.map(lambda x: computed_in(x, decoding.ctx.compute_dtype), params)
    length, specs = decoding.capacity.max_len, decoding.specs

    def step(cache: Any, token: jax.Array) -> tuple[Any, jax.Array]:
        logits, cache = decoded_by(model, params, token[None, None], cache, length, specs)
        return cache, logits[0, 0]

    _, cached = jax.lax.scan(step, empty_cache(model, params, length, specs), tokens)
    return cached, logits_of_row(model, params, tokens[None], specs)[0]
