"""Speculative decoding gives the tokens of the model alone, whatever is drafted, with the model's distribution."""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from meshpar.data.tokenizer import Ids
from meshpar.models import Llama
from meshpar.serve.answer import Answer
from meshpar.serve.batch import Batch, requests_of
from meshpar.serve.decoding import num_accepted
from meshpar.serve.drafts import NGrams
from meshpar.serve.engine import Engine
from meshpar.serve.paged_decoding import PagedDecoding
from meshpar.serve.paged_model import DraftModel
from meshpar.serve.sampling import Sampling
from tests import serving
from tests.serving import MAX_TOKENS, PROMPTS, batch_decoding, batch_engine, generated, params, placed

DRAWN = Sampling(temperature=1.0, top_k=12, top_p=0.9, seed=7)
VOCAB = 5
NO_END = Ids(vocab_size=30, bos=29)
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


def speculating(model: str, draft: str, layout: str, sampling: Sampling, num_drafts: int = 3, **sizes: int) -> Engine:
    """An engine with the drafts of another model, or of n-grams."""
    lowering = "auto" if layout == "one" else "manual"
    if draft == "ngrams":
        return batch_engine(model, layout, lowering, sampling, NGrams(1, num_drafts), **sizes)
    smaller = batch_decoding(draft, layout, lowering, sampling, num_drafts=num_drafts, **sizes)
    drafter = DraftModel(smaller, lambda structs: placed(params(draft), structs))
    return batch_engine(model, layout, lowering, sampling, drafter, **sizes)


def answers(engine: Engine, sampling: Sampling, prompts=PROMPTS, max_tokens=MAX_TOKENS) -> tuple[np.ndarray, Batch]:
    """int32[prompts, max_tokens], and the counts of the batch."""
    batch = Batch([Answer(NO_END, [], max_tokens) for _ in prompts])
    list(batch.stream(engine, requests_of(prompts, max_tokens, sampling)))
    return np.asarray([answer.tokens for answer in batch.answers]), batch


@lru_cache
def alone(sampling: Sampling) -> np.ndarray:
    return generated("llama", "one", "auto", sampling)


CASES = [
    ("llama", "one", Sampling()), ("ngrams", "one", DRAWN), ("llama_gqa_options", "data2_fsdp2_tensor2", DRAWN),
    ("llama_gqa_options", "one", Sampling()), ("ngrams", "tensor4", Sampling()), ("llama", "tensor4", DRAWN),
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("draft", "layout", "sampling"),
    [pytest.param(*case, marks=[] if i < 3 else pytest.mark.slow) for i, case in enumerate(CASES)],
)
def test_the_answer_is_that_of_the_model_alone(draft, layout, sampling):
    got, batch = answers(speculating("llama", draft, layout, sampling), sampling)
    assert (got == alone(sampling)).all()
    if draft == "llama":  # the model agrees with itself
        assert batch.acceptance == 1.0
        assert (len(batch.prefill_s), len(batch.decode_s)) == (1, -(-(MAX_TOKENS - 1) // 4))


def frequencies(draft: str) -> tuple[np.ndarray, np.ndarray]:
    """How often each pair of second and third tokens was drawn, and how often it is expected to be."""
    sizes = {"num_rows": NUM_DRAWS, "longest": 2, "max_tokens": 3}
    engine = speculating("tiny", draft, "one", PLAIN, num_drafts=2, **sizes)
    drawn, _ = answers(engine, PLAIN, [[1, 2]] * NUM_DRAWS, max_tokens=3)
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
    step = PagedDecoding._step

    def biased(self, params, tokens, positions, last, *more, **settings):
        chosen, scores, pages = step(self, params, tokens, positions, last, *more, **settings)
        return (chosen.at[:, 0].set(tokens[:, 1]) if last.ndim == 2 else chosen), scores, pages

    monkeypatch.setattr(PagedDecoding, "_step", biased)
    assert p_value(*frequencies("tiny_draft")) < 1e-6


def test_drafts_after_the_first_wrong_one_are_not_accepted():
    drafts = jnp.asarray([[1, 2, 3], [1, 9, 3], [9, 2, 3]], jnp.int32)
    tokens = jnp.broadcast_to(jnp.asarray([1, 2, 3, 4], jnp.int32), (3, 4))
    assert num_accepted(drafts, tokens).tolist() == [3, 1, 0]
