"""Sampled tokens against NumPy: which are possible, how often each is drawn, and the same with a sharded vocabulary."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from meshpar.errors import ConfigError
from meshpar.mesh.layout import MeshLayout
from meshpar.parallel.context import ParallelContext, tracing
from meshpar.serve import vocabulary
from meshpar.serve.sampling import Sampling, _least_kept, sample
from meshpar.sharding.rules import AxisRules

NUM_DRAWS = 4096
VOCAB = 29
PADDED = 32
LOGITS = np.float32(np.random.default_rng(0).normal(0, 1.5, PADDED))
SAMPLINGS = {
    "temperature": Sampling(temperature=0.7),
    "top_k": Sampling(temperature=1.3, top_k=5),
    "top_p": Sampling(temperature=1.0, top_p=0.8),
    "top_k and top_p": Sampling(temperature=1.0, top_k=12, top_p=0.6, seed=3),
    "min_p": Sampling(temperature=1.0, min_p=0.2),
    "top_p and min_p": Sampling(temperature=1.5, top_p=0.9, min_p=0.1, seed=4),
    "all of them": Sampling(temperature=1.0, top_k=99, top_p=1.0),
}


def reference(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The probability of each token, by the papers' definitions of top-k, top-p and min-p."""
    probabilities = np.exp(logits[:VOCAB].astype(np.float64) / sampling.temperature)
    order = np.argsort(-probabilities)[: sampling.top_k]
    share = probabilities[order] / probabilities[order].sum()
    kept = []
    total = 0.0
    for token, p in zip(order, share, strict=True):
        if total >= sampling.top_p or p < sampling.min_p * share[0]:
            break
        kept.append(token)
        total += p
    left = np.where(np.isin(np.arange(VOCAB), kept), probabilities, 0.0)
    return left / left.sum()


def draws(sampling: Sampling, logits: np.ndarray = LOGITS, num: int = NUM_DRAWS) -> np.ndarray:
    rows = jnp.arange(num, dtype=jnp.int32)
    drawn = partial(sample, how=sampling, vocab_size=VOCAB)
    return np.asarray(jax.jit(drawn)(jnp.broadcast_to(logits, (num, PADDED)), rows, rows % 7))


def distance(sampling: Sampling, want: Sampling) -> float:
    """The total variation between the drawn frequencies and the reference."""
    counts = np.bincount(draws(sampling), minlength=PADDED) / NUM_DRAWS
    return 0.5 * float(abs(counts[:VOCAB] - reference(LOGITS, want)).sum() + counts[VOCAB:].sum())


@pytest.mark.parametrize("name", SAMPLINGS)
def test_draws_have_the_distribution_of_the_reference(name):
    """Of 29 frequencies in 4096 draws, the expected distance is below half the sum of their deviations, 0.034."""
    sampling = SAMPLINGS[name]
    assert distance(sampling, sampling) < 0.05
    drawn = set(draws(sampling).tolist())
    possible = set(np.flatnonzero(reference(LOGITS, sampling)).tolist())
    assert drawn <= possible


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "top_k and top_p", "min_p"])
def test_control_another_distribution_is_seen(name):
    assert distance(Sampling(temperature=1.0), SAMPLINGS[name]) > 0.05


@settings(max_examples=40, deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB, unique=True),
    top_k=st.sampled_from([1, 5, 40]), top_p=st.sampled_from([0.05, 0.3, 0.7, 0.95, 1.0]),
)  # fmt: skip
def test_the_threshold_keeps_the_tokens_of_the_reference(logits, top_k, top_p):
    sampling = Sampling(temperature=1.0, top_k=top_k, top_p=top_p)
    scores = np.float32([logits])
    least = float(_least_kept(vocabulary.top(jnp.asarray(scores), top_k), top_p)[0, 0])
    want = reference(scores[0], sampling)
    # A sum that rounds to the other side of top_p keeps one token more or less.
    assert abs(int((scores[0] >= least).sum()) - int((want > 0).sum())) <= 1
    assert scores[0].max() >= least


def test_a_top_p_of_1_keeps_the_least_probable():
    best = jnp.asarray([[8.0, 7.0, -8.0, -9.0]])
    assert float(_least_kept(best, 1.0)[0, 0]) == -9.0
    assert float(_least_kept(best, 0.99999)[0, 0]) == 7.0


def test_a_top_p_that_is_0_in_float32_keeps_the_most_probable():
    assert float(_least_kept(jnp.asarray([[8.0, 7.0, -8.0]]), 1e-60)[0, 0]) == 8.0


def test_greedy_sampling_takes_the_first_of_equal_logits():
    logits = np.zeros(PADDED, np.float32)
    logits[[4, 9]] = 2.0
    logits[30] = 5.0  # padding of the vocabulary
    assert set(draws(Sampling(), logits, 3).tolist()) == {4}


def test_a_draw_depends_on_seed_row_and_position_alone():
    sampling = SAMPLINGS["temperature"]
    assert (draws(sampling) == draws(sampling)).all()
    assert (draws(sampling, num=8) == draws(sampling)[:8]).all()
    assert (draws(sampling) != draws(Sampling(temperature=0.7, seed=1))).any()
    same_row = jax.jit(partial(sample, how=sampling, vocab_size=VOCAB))(
        jnp.broadcast_to(LOGITS, (64, PADDED)), jnp.zeros(64, jnp.int32), jnp.arange(64, dtype=jnp.int32)
    )
    assert len(set(np.asarray(same_row).tolist())) > 5


@pytest.mark.parametrize("name", ["greedy", "top_p", "top_k and top_p"])
def test_shards_of_the_vocabulary_give_the_same_tokens(name):
    sampling = SAMPLINGS.get(name, Sampling())
    mesh = MeshLayout(tensor=4).build(jax.devices()[:4])
    rows = jnp.arange(64, dtype=jnp.int32)
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(64, PADDED)), jnp.float32)

    def local(logits, rows):
        with tracing(ParallelContext(mesh=mesh, rules=AxisRules(preset=("megatron",)), manual=True)):
            return sample(logits, rows, rows, sampling, VOCAB)

    specs = (PartitionSpec(None, "tensor"), PartitionSpec())
    sharded = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))
    whole = jax.jit(lambda logits, rows: sample(logits, rows, rows, sampling, VOCAB))
    np.testing.assert_array_equal(sharded(logits, rows), whole(logits, rows))


def test_invalid_settings_are_listed_together():
    with pytest.raises(ConfigError) as error:
        Sampling(temperature=-1, top_k=0, top_p=0, seed=-1)
    assert [line for line in str(error.value).splitlines() if line[2] != " "] == [
        "these settings of sampling are invalid:", "  temperature", "  top_k", "  top_p", "  seed",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="temperature 0 selects the most probable token, whatever top_k"):
        Sampling(top_k=3)
    with pytest.raises(ConfigError, match="nan is not 0 or more"):
        Sampling(temperature=float("nan"))
