"""The sizes of an engine: how many pages fit in the memory that is given, for one model or two, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshpar.errors import ConfigError
from meshpar.mesh.layout import MeshLayout
from meshpar.models import GPT
from meshpar.serve.drafts import NGrams
from meshpar.serve.open_engine import open_engine
from meshpar.serve.paged_decoding import PagedDecoding
from meshpar.serve.paged_model import DraftModel
from meshpar.serve.source import Source
from tests.serve.client import source_of
from tests.serving import SIZES

ROOM: dict[str, Any] = {"slots": 8, "max_len": 64, "page_size": 4}


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch):
    for name in ("compile_prefill", "compile_decode", "compile_verify", "compile_draft"):
        monkeypatch.setattr(PagedDecoding, name, lambda decoding: None)


def source(**sizes: Any) -> Source:
    """A Llama whose batch is sharded over eight devices."""
    found = source_of(**sizes)
    return replace(found, run=found.run.model_copy(update={"mesh": MeshLayout(data=8)}), language=None)


def gpt(max_seq_len: int) -> Source:
    found = source()
    model = GPT(**SIZES, max_seq_len=max_seq_len)
    return replace(found, run=found.run.model_copy(update={"model": model}))


def test_by_default_the_longest_requests_fit_in_all_slots():
    capacity = open_engine(source(), **ROOM | {"slots": 9}).decoding.capacity
    assert (capacity.num_shards, capacity.slots, capacity.pages) == (8, 2, 2 * 16)


@pytest.mark.parametrize("draft", [None, source(num_layers=1)])
def test_the_pages_fit_in_the_memory_that_is_given(draft):
    engine = open_engine(source(), **ROOM, draft=draft, cache_bytes=100_000)
    decodings = [engine.decoding, *([engine.drafter.decoding] if isinstance(engine.drafter, DraftModel) else [])]
    used = sum(decoding.cache_bytes for decoding in decodings)
    assert len(decodings) == (1 if draft is None else 2)
    assert 100_000 - sum(decoding.page_bytes for decoding in decodings) < used <= 100_000
    assert len({decoding.capacity for decoding in decodings}) == 1


def test_drafts_are_compiled_only_if_something_drafts():
    engine = open_engine(source(), **ROOM)
    assert (engine.drafter, engine.decoding.num_drafts) == (None, 0)
    engine = open_engine(source(), **ROOM, ngrams=2, num_drafts=3)
    assert (engine.drafter, engine.decoding.num_drafts) == (NGrams(2, 3), 3)
    assert str(engine).endswith(", 3 drafts a row")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_bytes": 9000}, "8.79 KiB do not hold a row of 64 tokens 16.00 KiB, or a smaller max_len"),
        ({"draft": source(vocab_size=31)}, "its vocabulary has 31 ids, and that of the model 29"),
        ({"draft": gpt(32)}, "it has 32 positions, and the longest row has 64 tokens max_len=32"),
        ({"draft": source(), "ngrams": 2}, "a draft model proposes the tokens already"),
        ({"ngrams": 2, "num_drafts": 0}, "num_drafts"),
    ],
)
def test_what_does_not_fit_is_refused(settings, message):
    with pytest.raises(ConfigError) as error:
        open_engine(source(), **ROOM | settings)
    assert message in " ".join(str(error.value).split())
