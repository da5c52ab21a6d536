"""Speculative decoding gives the tokens of the model alone, whatever is drafted, with the model's distribution."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from meshpar.models import Llama
from meshpar.serve import speculative
from meshpar.serve.sampling import Sampling
from meshpar.serve.speculative import DraftModel, PromptLookup, SpeculativeGenerator, num_accepted
from tests import serving
from tests.serving import MAX_TOKENS, PROMPTS, decoding, generator, params, placed, tokens

DRAWN = Sampling(temperature=1.0, top_k=12, top_p=0.9, seed=7)
VOCAB = 5
PLAIN = Sampling(temperature=1.0, seed=3)
NUM_DRAWS = 4096
TINY = {"num_layers": 1, "num_heads": 2, "intermediate_size": 8, "vocab_size": VOCAB}


@pytest.fixture(autouse=True)
def _float64(float64):
    """Every test of this module computes in float64."""


@pytest.fixture(autouse=True, scope="module")
def _models():
    """Two tiny models with one vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        models = {"tiny": Llama(**TINY, hidden_size=8), "tiny_draft": Llama(**TINY, hidden_size=4)}
        patch.setattr(serving, "MODELS", serving.MODELS | models)
        yield


def speculating(model: str, draft: str, layout: str, sampling: Sampling, num_drafts: int = 3, **sizes):
    """A generator with the drafts of another model, or of n-grams."""
    lowering = "auto" if layout == "one" else "manual"
    own = decoding(model, layout, lowering, sampling, num_drafts=num_drafts, **sizes)

    def restored(of: str):
        return lambda structs: placed(params(of), structs)

    if draft == "ngrams":
        return SpeculativeGenerator(own, restored(model), drafter=PromptLookup(own, 1))
    smaller = replace(own, model=serving.MODELS[draft])
    return SpeculativeGenerator(own, restored(model), drafter=DraftModel(smaller), restore_draft=restored(draft))


def answers(generator, prompts=PROMPTS) -> np.ndarray:
    """int32[prompts, max_tokens]."""
    found: list[list[int]] = [[] for _ in prompts]
    for of_rows in generator.lists(prompts):
        for row, new in zip(found, of_rows, strict=True):
            row.extend(new)
    return np.asarray(found)


@lru_cache
def alone(sampling: Sampling) -> np.ndarray:
    return tokens(generator("llama", "one", "auto", sampling))


CASES = [
    ("llama", "one", Sampling()), ("ngrams", "one", DRAWN), ("llama_gqa_options", "data2_fsdp2_tensor2", DRAWN),
    ("llama_gqa_options", "one", Sampling()), ("ngrams", "tensor4", Sampling()), ("llama", "tensor4", DRAWN),
]  # fmt: skip


@pytest.mark.parametrize(
    ("draft", "layout", "sampling"),
    [pytest.param(*case, marks=[] if i < 3 else pytest.mark.slow) for i, case in enumerate(CASES)],
)
def test_the_answer_is_that_of_the_model_alone(draft, layout, sampling):
    speculative = speculating("llama", draft, layout, sampling)
    assert (answers(speculative) == alone(sampling)).all()
    if draft == "llama":  # the model agrees with itself
        assert speculative.acceptance == 1.0
        assert len(list(speculative.lists(PROMPTS))) == 1 + -(-(MAX_TOKENS - 1) // 4)


def frequencies(draft: str) -> tuple[np.ndarray, np.ndarray]:
    """How often each pair of second and third tokens was drawn, and how often it is expected to be."""
    sizes = {"num_rows": NUM_DRAWS, "prompt_len": 2, "max_tokens": 3}
    drawn = answers(speculating("tiny", draft, "one", PLAIN, num_drafts=2, **sizes), [[1, 2]] * NUM_DRAWS)
    counts = np.zeros((VOCAB,) * 3)
    np.add.at(counts, tuple(drawn.T), 1)
    return counts.reshape(-1), NUM_DRAWS * probabilities().reshape(-1)


@lru_cache
def probabilities() -> np.ndarray:
    """The model's probability of each three tokens after the prompt, from full forwards."""
    found = np.ones((VOCAB,) * 3)
    for first in range(VOCAB):
        for second in range(VOCAB):
            each = jax.nn.softmax(serving.full_logits("tiny", [1, 2, first, second])[:, :VOCAB], axis=-1)
            found[first, second] = np.asarray(each[1, first] * each[2, second] * each[3])
    return found


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    rare = expected < 5  # too rare for the test: one class together
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    return float(stats.chisquare(counts, expected).pvalue)


@pytest.mark.parametrize("draft", ["tiny_draft", "ngrams"])
def test_sampled_tokens_have_the_distribution_of_the_model(draft):
    assert p_value(*frequencies(draft)) > 0.01


def test_planted_an_accepted_draft_that_the_model_did_not_sample_is_seen(monkeypatch):
    """The first draft is accepted in any case, and replaces the model's token."""

    def biased(self, params, turn, drafts, cache):
        tokens, cache = own_tokens(self, params, turn, drafts, cache)
        return tokens.at[:, 0].set(drafts[:, 0]), cache

    own_tokens = speculative.Speculation._own_tokens
    monkeypatch.setattr(speculative.Speculation, "_own_tokens", biased)
    assert p_value(*frequencies("tiny_draft")) < 1e-6


def test_drafts_after_the_first_wrong_one_are_not_accepted():
    drafts = jnp.asarray([[1, 2, 3], [1, 9, 3], [9, 2, 3]], jnp.int32)
    tokens = jnp.broadcast_to(jnp.asarray([1, 2, 3, 4], jnp.int32), (3, 4))
    assert num_accepted(drafts, tokens).tolist() == [3, 1, 0]
