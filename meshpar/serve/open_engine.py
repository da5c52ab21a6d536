"""Opens the engine of a trained model, with sizes that fit it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshpar.errors import ConfigError, Problems
from meshpar.nn.transformer import Decoder
from meshpar.serve.engine import Engine
from meshpar.serve.paged_decoding import PagedDecoding
from meshpar.serve.scheduler import Capacity
from meshpar.serve.source import Source
from meshpar.tree import human_bytes

MAX_LEN = 2048
"""The longest row, if it is not given."""


def open_engine(
    source: Source,
    *,
    slots: int = 16,
    max_len: int | None = None,
    page_size: int = 16,
    cache_bytes: int | None = None,
    chunk: int = 128,
    max_queue: int = 256,
) -> Engine:
    """The engine of a trained model on the mesh of its run.

    Args:
      slots: rows that are decoded together, rounded up to a multiple of the batch's shards.
      max_len: see `Capacity`; None for 2048, or fewer if the model has fewer positions.
      cache_bytes: bytes of the pages on a device; None for as many as longest rows in all slots need.
      page_size, chunk, max_queue: see `Capacity`.

    Raises:
      ConfigError: lists all that does not fit the model.
      CheckpointError, MeshError, ShardingError: there is no checkpoint, or it does not fit the mesh.
    """
    problems = Problems()
    max_len = _max_len(source.model, max_len, problems)
    if (size := source.tokenizer.vocab_size) > source.model.vocab_size:
        what = f"the tokenizer has {size} ids, the model {source.model.vocab_size}"
        problems.add("model.vocab_size", what, "the tokenizer that the model was trained with")
    ctx = source.ctx(source.run.mesh.build())
    shards = ctx.shards("batch")
    per_shard = -(-slots // shards)
    capacity = Capacity(
        num_shards=shards, slots=per_shard, pages=per_shard * -(-max_len // page_size), page_size=page_size,
        max_len=max_len, chunk=chunk, max_queue=max_queue,
    )  # fmt: skip
    precision = source.run.precision
    decoding = PagedDecoding(
        model=source.model, ctx=ctx, dtype=np.dtype(precision.params), cache_format=precision.cache, capacity=capacity
    )
    if cache_bytes is not None:
        decoding = _within(decoding, cache_bytes, problems)
    problems.raise_any(ConfigError, "the model cannot be served with these sizes:")
    return Engine(decoding, source.restore)


def _max_len(model: Decoder, max_len: int | None, problems: Problems) -> int:
    """The tokens of the longest row."""
    if not model.learned_positions:
        return max_len or MAX_LEN
    if max_len is None:
        return min(MAX_LEN, model.max_seq_len)
    if max_len > model.max_seq_len:
        what = f"{max_len} tokens do not fit model.max_seq_len = {model.max_seq_len}"
        problems.add("max_len", what, str(model.max_seq_len))
    return max_len


def _within(decoding: PagedDecoding, cache_bytes: int, problems: Problems) -> PagedDecoding:
    """The settings with as many pages as fit in so many bytes of a device."""
    pages = cache_bytes // decoding.page_bytes - 1  # one belongs to no row
    capacity = replace(decoding.capacity, pages=pages)
    if pages < capacity.pages_of_row:
        least = decoding.page_bytes * (1 + capacity.pages_of_row)
        what = f"{human_bytes(cache_bytes)} do not hold a row of {capacity.max_len} tokens"
        problems.add("cache", what, f"{human_bytes(least)}, or shorter rows")
    return replace(decoding, capacity=capacity)
