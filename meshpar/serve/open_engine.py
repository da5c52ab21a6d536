"""Opens the engine of a trained model, with sizes that fit it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from meshpar.errors import ConfigError, Problems
from meshpar.nn.decoder import Decoder
from meshpar.serve.drafts import NGrams
from meshpar.serve.engine import Engine
from meshpar.serve.own_source import CausalModel
from meshpar.serve.paged_decoding import PagedDecoding
from meshpar.serve.paged_model import DraftModel
from meshpar.serve.sampling import Sampling
from meshpar.serve.scheduler import Capacity
from meshpar.serve.side_adapters import OpenedAdapters
from meshpar.serve.source import Source
from meshpar.tree import human_bytes

PAGE_SIZE = 16
MAX_LEN = 2048
"""The longest row, if it is not given."""
NUM_DRAFTS = 4
"""The tokens that are drafted at a time, if their number is not given."""


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
    scores_prompts: bool = True,
    adapters: OpenedAdapters | None = None,
) -> Engine:
    """The engine of a trained model on the mesh of its run.

    Args:
      slots: rows that are decoded together, rounded up to a multiple of the batch's shards.
      max_len: see `Capacity`; None for 2048, or fewer if the model has fewer positions; of a user's own model, whose
        positions are not known, for the length of the rows that it was trained with.
      cache_bytes: bytes of the pages on a device; None for enough pages for the longest rows in all slots.
      page_size, chunk, max_queue: see `Capacity`.
      draft, ngrams: what drafts tokens, see `generate`; None for no drafts.
      num_drafts: most tokens of a row that are drafted at a time.
      scores_prompts: whether requests may ask for the scores of their prompts.
      adapters: those that requests can choose, see `open_adapters`.

    Raises:
      ConfigError: lists all sizes that do not fit the model.
      CheckpointError, MeshError, ShardingError: there is no checkpoint, or it does not fit the mesh.
    """
    if own := source.own:
        _check_own(draft, ngrams, num_drafts, page_size, cache_bytes)
        return own.engine(slots, max_len or source.run.data.seq_len, chunk, max_queue)
    _check_drafts(source, draft, ngrams, num_drafts)
    problems = Problems()
    max_len = _max_len(source.model, max_len, problems)
    check_tokenizer(source, problems)
    capacity = Capacity.of_rows(
        source.ctx.shards("batch"), slots, max_len, page_size, chunk=chunk, max_queue=max_queue
    )  # fmt: skip
    decoding = _decoding(
        source, capacity, num_drafts=num_drafts if draft or ngrams else 0, scores_prompts=scores_prompts,
        adapters=adapters and adapters.sizes,
    )  # fmt: skip
    smaller = _smaller(decoding, draft, problems) if draft else None
    if cache_bytes is not None:
        decoding, smaller = _within(decoding, smaller, cache_bytes, problems)
    problems.raise_any(ConfigError, "the model cannot be served with these sizes:")
    restore = partial(adapters.restore, source) if adapters else source.restore
    return Engine(decoding, restore, _drafter(draft, smaller, ngrams, num_drafts))


def open_batch(
    source: Source | CausalModel,
    sampling: Sampling,
    *,
    num_rows: int,
    longest: int,
    max_tokens: int,
    draft: Source | None = None,
    ngrams: int | None = None,
    num_drafts: int = NUM_DRAFTS,
) -> Engine:
    """The engine of a batch of prompts that begin together, as in `generate`: each row is one page.

    Args:
      sampling: of all rows.
      num_rows: prompts, rounded up to a multiple of the batch's shards.
      longest, max_tokens: most tokens of a prompt, and of an answer.
      draft, ngrams, num_drafts: see `open_engine`.

    Raises:
      ConfigError: lists all problems of the drafts.
      CheckpointError, MeshError, ShardingError: there is no checkpoint, or it does not fit the mesh.
    """
    if own := own_of(source):
        _check_own(draft, ngrams, num_drafts)
        return own.engine(num_rows, longest + max_tokens, chunk=longest)
    assert isinstance(source, Source)
    _check_drafts(source, draft, ngrams, num_drafts)
    capacity = Capacity.of_rows(
        source.ctx.shards("batch"), num_rows, longest + max_tokens, chunk=longest, all_prompts=True, max_queue=num_rows
    )  # fmt: skip
    decoding = _decoding(source, capacity, num_drafts=num_drafts if draft or ngrams else 0, sampling=sampling)
    problems = Problems()
    smaller = _smaller(decoding, draft, problems) if draft else None
    problems.raise_any(ConfigError, "these drafts cannot be used:")
    return Engine(decoding, source.restore, _drafter(draft, smaller, ngrams, num_drafts))


def own_of(source: Source | CausalModel) -> CausalModel | None:
    """The user's own model; None of one of meshpar's decoders."""
    return source if isinstance(source, CausalModel) else source.own


def _decoding(source: Source, capacity: Capacity, **settings: Any) -> PagedDecoding:
    dtype, cache_format = np.dtype(source.run.precision.params), source.run.precision.cache
    return PagedDecoding(
        model=source.model, ctx=source.ctx, dtype=dtype, cache_format=cache_format, capacity=capacity, **settings
    )  # fmt: skip


def _drafter(
    draft: Source | None, smaller: PagedDecoding | None, ngrams: int | None, num_drafts: int
) -> DraftModel | NGrams | None:
    if draft and smaller:
        return DraftModel(smaller, draft.restore)
    return NGrams(ngrams, num_drafts) if ngrams else None


def check_tokenizer(source: Source, problems: Problems) -> None:
    """Reports a tokenizer with ids that the model does not have."""
    if (size := source.tokenizer.vocab_size) > source.model.vocab_size:
        what = f"the tokenizer has {size} ids, the model {source.model.vocab_size}"
        problems.add("model.vocab_size", what, "the tokenizer that the model was trained with")


def _check_own(
    draft: Any, ngrams: int | None, num_drafts: int, page_size: int = PAGE_SIZE, cache_bytes: int | None = None
) -> None:
    """Checks that no option is given that a model of the user's own cannot follow."""
    drafts = "a model of your own decodes one token at a time"
    pages = "the cache of a model of your own has no pages: each slot has its own"
    given = {
        "draft": (draft is not None, drafts),
        "ngrams": (ngrams is not None, drafts),
        "num_drafts": (num_drafts != NUM_DRAFTS, drafts),
        "page_size": (page_size != PAGE_SIZE, pages),
        "cache": (cache_bytes is not None, pages),
    }
    problems = Problems()
    for name, (is_given, why) in given.items():
        if is_given:
            problems.add(name, why, "leave it out")
    problems.raise_any(ConfigError, "these options do not fit a model of your own:")


def _check_drafts(source: Source, draft: Source | None, ngrams: int | None, num_drafts: int) -> None:
    """Checks the options of speculative decoding.

    Raises:
      ConfigError: lists all problems.
    """
    problems = Problems()
    if draft is not None and ngrams is not None:
        problems.add("ngrams", "a draft model proposes the tokens already", "leave out one of draft and ngrams")
    if ngrams is not None and ngrams < 1:
        problems.add("ngrams", f"{ngrams} is not 1 or more", "2")
    if num_drafts < 1:
        problems.add("num_drafts", f"{num_drafts} is not 1 or more", str(NUM_DRAFTS))
    elif num_drafts != NUM_DRAFTS and draft is None and ngrams is None:
        problems.add("num_drafts", f"{num_drafts} tokens at a time, and nothing drafts", "ngrams=2, or a draft")
    if draft is not None and not draft.decoder:
        problems.add("draft", "a model of your own does not draft", "one of meshpar's decoders, or leave it out")
    elif draft is not None and draft.model.vocab_size != source.model.vocab_size:
        what = f"its vocabulary has {draft.model.vocab_size} ids, and that of the model {source.model.vocab_size}"
        problems.add("draft", what, "a smaller model with the same tokenizer")
    problems.raise_any(ConfigError, "these drafts cannot be used:")


def _smaller(decoding: PagedDecoding, draft: Source, problems: Problems) -> PagedDecoding:
    """The settings of a model that drafts, with the mesh and the sizes of the model."""
    capacity, positions = decoding.capacity, draft.model.max_seq_len
    if draft.model.learned_positions and capacity.max_len > positions:
        what = f"it has {positions} positions, and the longest row has {capacity.max_len} tokens"
        fix = f"max_len={positions}"
        if decoding.is_batch:
            room = positions - capacity.chunk
            fix = f"max_tokens={room}" if room > 0 else "a draft with more positions, or shorter prompts"
        problems.add("draft", what, fix)
    precision = draft.run.precision
    dtype, cache_format = np.dtype(precision.params), precision.cache
    return replace(decoding, model=draft.model, scores_prompts=False, dtype=dtype, cache_format=cache_format)


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
    pages = cache_bytes // page_bytes
    capacity = replace(decoding.capacity, pages=pages)
    if pages < capacity.pages_of_row:
        least = page_bytes * capacity.pages_of_row
        what = f"{human_bytes(cache_bytes)} do not hold a row of {capacity.max_len} tokens"
        problems.add("cache", what, f"{human_bytes(least)}, or a smaller max_len")
    return replace(decoding, capacity=capacity), smaller and replace(smaller, capacity=capacity)
