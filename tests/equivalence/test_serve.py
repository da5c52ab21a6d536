"""Tokens of a server equal those of `generate`, whatever else it computes, on any mesh."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import pytest

from meshpar.serve.drafts import NGrams
from meshpar.serve.sampling import Sampling
from meshpar.serve.scheduler import Request
from tests import serving
from tests.serving import LAYOUTS, MAX_TOKENS, MODELS, PROMPTS, engine, served

DRAWN = Sampling(temperature=1.0, top_k=12, top_p=0.9, seed=7)
DRAFTER = NGrams(size=1, num_drafts=2)
SAMPLE = ("llama_gqa_options", "tensor4", "manual")  # tests/serve/test_http.py computes others
each_case = pytest.mark.parametrize(
    ("model", "layout", "lowering"),
    [
        pytest.param(*case, marks=[] if case == SAMPLE else pytest.mark.slow)
        for case in product(MODELS, LAYOUTS, ("manual", "auto"))
    ],
)


@pytest.fixture(autouse=True)
def _float64(float64, monkeypatch):
    """Every test of this module computes in float64, and attends to several blocks of pages."""
    monkeypatch.setattr("meshpar.nn.attention.paged.BLOCK_SIZE", 8)


@lru_cache
def generated(model: str, sampling: Sampling = Sampling()) -> list[list[int]]:  # noqa: B008
    """The answers of `generate` to the prompts, on one device."""
    return serving.generated(model, "one", "auto", sampling).tolist()


def requests(sampling: Sampling = Sampling()) -> list[Request]:  # noqa: B008
    return [
        Request(prompt=prompt, max_tokens=MAX_TOKENS, sampling=sampling, index=i) for i, prompt in enumerate(PROMPTS)
    ]


@each_case
def test_greedy_and_drawn_tokens_in_one_batch_equal_those_of_generate(model, layout, lowering):
    """Four prompts of each kind, in two slots of each shard, with prompts longer than a chunk and than a page; without
    drafts, and with drafts."""
    server = engine(model, layout, lowering, drafter=DRAFTER)
    for drafter in (None, DRAFTER):
        server.drafter = drafter
        got = served(server, [*requests(), *requests(DRAWN)])
        assert got[:4] == generated(model)
        assert got[4:] == generated(model, DRAWN)


@pytest.mark.slow
def test_tokens_with_pages_in_int8_are_those_of_one_device():
    one, mesh = (
        engine("llama", layout, "manual", cache_format="int8", drafter=DRAFTER) for layout in ("one", "data2_tensor4")
    )
    with_drafts = served(one, requests())
    assert served(mesh, requests()) == with_drafts
    one.drafter = None
    assert served(one, requests()) == with_drafts
