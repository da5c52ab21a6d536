"""Opens the engine of a trained model, with sizes that fit it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from meshpar.errors import ConfigError, Problems
from meshpar.nn.transformer import Decoder
from meshpar.serve.draft_model import DraftModel
from meshpar.serve.drafts import Drafter, NGrams
from meshpar.serve.engine import Engine
from meshpar.serve.generate import NUM_DRAFTS, check_drafts, check_own
from meshpar.serve.own_engine import OwnEngine
from meshpar.serve.paged_decoding import PagedDecoding
from meshpar.serve.scheduler import Capacity
from meshpar.serve.side_adapters import OpenedAdapters
from meshpar.serve.source import Source
from meshpar.tree import human_bytes

PAGE_SIZE = 16
MAX_LEN = 2048
"""The longest row, if it is not given."""


def open_engine(
    source: Source,
    *,
    slots: int = 16,
    max_len: int | None = None,
    page_size: int = PAGE_SIZE,
    cache_bytes: int | None = None,
    chunk: int = 128,
    max_queue: int = 256,
    draft: Source | None = None,
    ngrams: int | None = None,
    num_drafts: int = NUM_DRAFTS,
    adapters: OpenedAdapters | None = None,
) -> Engine | OwnEngine:
    """The engine of a trained model on the mesh of its run.

    Args:
      slots: rows that are decoded together, rounded up to a multiple of the batch's shards.
      max_len: see `Capacity`; None for 2048, or fewer if the model has fewer positions; of a user's own model, whose
        positions are not known, for the length of the rows that it was trained with.
      cache_bytes: bytes of the pages on a device; None for enough pages for the longest rows in all slots.
      page_size, chunk, max_queue: see `Capacity`.
      draft, ngrams: what drafts tokens, see `generate`; None for no drafts.
      num_drafts: most tokens of a row that are drafted at a time.
      adapters: those that requests can choose, see `open_adapters`.

    Raises:
      ConfigError: lists all sizes that do not fit the model.
      CheckpointError, MeshError, ShardingError: there is no checkpoint, or it does not fit the mesh.
    """
    if own := source.own:
        check_own((), draft, ngrams)
        _check_pages(page_size, cache_bytes)
        return own.engine(slots, max_len or source.run.data.seq_len, chunk, max_queue)
    check_drafts(source, draft, ngrams, num_drafts)
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
        model=source.model, ctx=ctx, dtype=np.dtype(precision.params), cache_format=precision.cache, capacity=capacity,
        num_drafts=num_drafts if draft or ngrams else 0, scores_prompts=True,
        adapters=adapters and adapters.sizes,
    )  # fmt: skip
    smaller = _smaller(decoding, draft, problems) if draft else None
    if cache_bytes is not None:
        decoding, smaller = _within(decoding, smaller, cache_bytes, problems)
    problems.raise_any(ConfigError, "the model cannot be served with these sizes:")
    drafter: Drafter | None = NGrams(ngrams, num_drafts) if ngrams else None
    if draft and smaller:
        drafter = DraftModel(smaller, draft.restore)
    return Engine(decoding, partial(adapters.restore, source) if adapters else source.restore, drafter)


def _check_pages(page_size: int, cache_bytes: int | None) -> None:
    """Checks that no size of pages is given, which the cache of a user's own model does not have."""
    problems = Problems()
    given = {"page_size": page_size != PAGE_SIZE, "cache": cache_bytes is not None}
    for name in (name for name, is_given in given.items() if is_given):
        problems.add(name, "the cache of a model of your own has no pages: each slot has its own", "leave it out")
    problems.raise_any(ConfigError, "the model cannot be served with these sizes:")


def _smaller(decoding: PagedDecoding, draft: Source, problems: Problems) -> PagedDecoding:
    """The settings of a model that drafts, with the mesh and the sizes of the model."""
    longest = decoding.capacity.max_len
    if draft.model.learned_positions and longest > draft.model.max_seq_len:
        what = f"it has {draft.model.max_seq_len} positions, and the longest row has {longest} tokens"
        problems.add("draft", what, f"max_len={draft.model.max_seq_len}")
    precision = draft.run.precision
    return replace(
        decoding,
        model=draft.model,
        scores_prompts=False,
        dtype=np.dtype(precision.params),
        cache_format=precision.cache,
    )


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


def _within(
    decoding: PagedDecoding, smaller: PagedDecoding | None, cache_bytes: int, problems: Problems
) -> tuple[PagedDecoding, PagedDecoding | None]:
    """The settings of both models with as many pages as fit in so many bytes of a device."""
    page_bytes = decoding.page_bytes + (smaller.page_bytes if smaller else 0)
    pages = cache_bytes // page_bytes - 1  # one belongs to no row
    capacity = replace(decoding.capacity, pages=pages)
    if pages < capacity.pages_of_row:
        least = page_bytes * (1 + capacity.pages_of_row)
        what = f"{human_bytes(cache_bytes)} do not hold a row of {capacity.max_len} tokens"
        problems.add("cache", what, f"{human_bytes(least)}, or a smaller max_len")
    return replace(decoding, capacity=capacity), smaller and replace(smaller, capacity=capacity)
