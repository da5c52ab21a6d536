"""Tokens that a mesh generates equal those of one device, and cached logits equal those of a full forward."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.nn.attention.core import causal_window
from meshpar.nn.attention.key_heads import local_key_heads
from meshpar.nn.attention.paged import PagedLayer
from meshpar.serve.sampling import Sampling
from tests.serving import LAYOUTS, MAX_TOKENS, MODELS, PROMPTS, cached_logits, full_logits, generated

DRAWN = Sampling(temperature=1.0, top_k=12, top_p=0.9, seed=7)
CASES = list(product(MODELS, LAYOUTS, ("manual", "auto")))
SAMPLE = [
    ("llama_gqa_options", "tensor4", "manual"),
    ("llama", "data2_fsdp2_tensor2", "manual"),
    ("gpt_tied", "data2_fsdp2_tensor2", "auto"),
    ("llama_experts", "expert2_fsdp2_tensor2", "manual"),
]
DRAWN_CASES = list(product(LAYOUTS, ("manual", "auto")))
each_case = pytest.mark.parametrize(
    ("model", "layout", "lowering"),
    [pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.slow) for case in CASES],
)
ROWS = np.random.default_rng(0).integers(0, 29, (len(PROMPTS), 6 + MAX_TOKENS))


@lru_cache
def on_one_device(model: str, sampling: Sampling = Sampling()) -> np.ndarray:  # noqa: B008
    return generated(model, "one", "auto", sampling)


def difference(model: str, layout: str, lowering: str) -> float:
    """The largest difference between the logits with the cache, of prompts and further tokens, and of full forwards."""
    got = cached_logits(model, layout, lowering, ROWS)
    ends = [np.arange(len(prompt), len(prompt) + MAX_TOKENS) for prompt in PROMPTS]
    want = [full_logits(model, row)[end - 1] for row, end in zip(ROWS, ends, strict=True)]
    return float(abs(got - np.stack(want)).max())


@pytest.fixture(autouse=True)
def _float64(float64):
    """Every test of this module computes in float64."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_are_the_most_probable_of_full_forwards(model):
    for prompt, answer in zip(PROMPTS, on_one_device(model), strict=True):
        logits = full_logits(model, [*prompt, *answer])
        assert (logits[len(prompt) - 1 : -1].argmax(-1) == answer).all()
    assert len(np.unique(on_one_device(model))) > 5  # not one token repeated


@each_case
def test_greedy_tokens_equal_those_of_one_device(model, layout, lowering):
    assert (generated(model, layout, lowering) == on_one_device(model)).all()


@each_case
def test_cached_logits_equal_those_of_the_full_forward(model, layout, lowering):
    assert difference(model, layout, lowering) < 1e-10


@pytest.mark.parametrize(
    ("layout", "lowering"),
    [pytest.param(*case, marks=[] if case == ("tensor4", "manual") else pytest.mark.slow) for case in DRAWN_CASES],
)
def test_drawn_tokens_equal_those_of_one_device(layout, lowering):
    got = generated("llama", layout, lowering, DRAWN)
    assert (got == on_one_device("llama", DRAWN)).all()
    assert (got != on_one_device("llama")).any()


def test_an_answer_does_not_depend_on_the_other_prompts_of_the_batch():
    alone = generated("llama", "one", "auto", DRAWN, prompts=PROMPTS[:1])
    assert (alone == on_one_device("llama", DRAWN)[:1]).all()


# Planted faults -------------------------------------------------------------------------------------------------


def test_planted_a_key_in_the_next_slot_is_seen(monkeypatch):
    put = PagedLayer._put

    def into_the_next_slot(core, all_, new, positions):
        return put(core, all_, new, positions + 1)

    monkeypatch.setattr(PagedLayer, "_put", into_the_next_slot)
    assert difference("llama", "one", "auto") > 1e-2


def test_planted_attention_to_padding_is_seen(monkeypatch):
    def longest(positions):
        return jnp.broadcast_to(positions.max(0), positions.shape)

    def as_in_the_longest_row(queries, keys, window):
        return causal_window(longest(queries), keys, window)

    monkeypatch.setattr("meshpar.nn.attention.paged.causal_window", as_in_the_longest_row)
    assert difference("llama", "one", "auto") > 1e-2


def test_planted_a_window_that_is_too_wide_is_seen(monkeypatch):
    def wider(queries, keys, window):
        return causal_window(queries, keys, None if window is None else window + 1)

    monkeypatch.setattr("meshpar.nn.attention.paged.causal_window", wider)
    got = cached_logits("llama_gqa_options", "one", "auto", ROWS)
    monkeypatch.undo()
    assert abs(got - cached_logits("llama_gqa_options", "one", "auto", ROWS)).max() > 1e-2


def test_planted_key_heads_of_another_shard_are_seen(monkeypatch):
    def rolled(k, q):
        return local_key_heads(jnp.roll(k, 1, axis=2), q)

    monkeypatch.setattr("meshpar.nn.attention.paged.local_key_heads", rolled)
    assert difference("llama_gqa_options", "tensor4", "manual") > 1e-2


def test_planted_noise_that_is_drawn_by_device_is_seen(monkeypatch):
    monkeypatch.setattr("meshpar.serve.sampling.shard", lambda noise, axes, dim: noise[:, : noise.shape[1] // 4])
    assert (generated("llama", "tensor4", "manual", DRAWN) != on_one_device("llama", DRAWN)).any()
