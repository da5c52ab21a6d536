"""What is drawn, against NumPy: which tokens at all, how often each, and the same from shards of the vocabulary."""

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
from meshpar.parallel import tensor
from meshpar.parallel.context import ParallelContext, tracing
from meshpar.serve.sampling import Sampling, _least_kept, sample
from meshpar.sharding.rules import AxisRules

NUM_DRAWS, VOCAB, PADDED = 4096, 29, 32
LOGITS = np.float32(np.random.default_rng(0).normal(0, 1.5, PADDED))
SAMPLINGS = {
    "temperature": Sampling(temperature=0.7),
    "top_k": Sampling(temperature=1.3, top_k=5),
    "top_p": Sampling(temperature=1.0, top_p=0.8),
    "top_k and top_p": Sampling(temperature=1.0, top_k=12, top_p=0.6, seed=3),
    "all of them": Sampling(temperature=1.0, top_k=99, top_p=1.0),
}


def reference(logits: np.ndarray, how: Sampling) -> np.ndarray:
    """The probability of each token, one after the other as the papers say it."""
    probabilities = np.exp(logits[:VOCAB].astype(np.float64) / how.temperature)
    order = np.argsort(-probabilities)[: how.top_k]
    share = probabilities[order] / probabilities[order].sum()
    kept, total = [], 0.0
    for token, p in zip(order, share, strict=True):
        if total >= how.top_p:
            break
        kept.append(token)
        total += p
    left = np.where(np.isin(np.arange(VOCAB), kept), probabilities, 0.0)
    return left / left.sum()


def draws(how: Sampling, logits: np.ndarray = LOGITS, num: int = NUM_DRAWS) -> np.ndarray:
    rows = jnp.arange(num, dtype=jnp.int32)
    drawn = partial(sample, how=how, vocab_size=VOCAB)
    return np.asarray(jax.jit(drawn)(jnp.broadcast_to(logits, (num, PADDED)), rows, rows % 7))


def distance(how: Sampling, want: Sampling) -> float:
    """Total variation between what was drawn and what should be."""
    counts = np.bincount(draws(how), minlength=PADDED) / NUM_DRAWS
    return 0.5 * float(abs(counts[:VOCAB] - reference(LOGITS, want)).sum() + counts[VOCAB:].sum())


@pytest.mark.parametrize("name", SAMPLINGS)
def test_draws_have_the_distribution_of_the_reference(name):
    """Of 29 frequencies in 4096 draws, the expected distance is below half the sum of their deviations, 0.034."""
    how = SAMPLINGS[name]
    assert distance(how, how) < 0.05
    drawn, possible = set(draws(how).tolist()), set(np.flatnonzero(reference(LOGITS, how)).tolist())
    assert drawn <= possible


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "top_k and top_p"])
def test_another_distribution_is_seen(name):
    assert distance(Sampling(temperature=1.0), SAMPLINGS[name]) > 0.05


@settings(max_examples=40, deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB, unique=True),
    top_k=st.sampled_from([1, 5, 40]), top_p=st.sampled_from([0.05, 0.3, 0.7, 0.95, 1.0]),
)  # fmt: skip
def test_only_tokens_that_are_kept_are_drawn(logits, top_k, top_p):
    how = Sampling(temperature=1.0, top_k=top_k, top_p=top_p)
    scores = np.float32([logits])
    least = float(_least_kept(tensor.top(jnp.asarray(scores), top_k), top_p)[0, 0])
    want = reference(scores[0], how)
    # A sum that rounds to the other side of top_p keeps one token more or less.
    assert abs(int((scores[0] >= least).sum()) - int((want > 0).sum())) <= 1
    assert scores[0].max() >= least


def test_a_top_p_of_1_keeps_the_least_probable():
    best = jnp.asarray([[8.0, 7.0, -8.0, -9.0]])
    assert float(_least_kept(best, 1.0)[0, 0]) == -9.0
    assert float(_least_kept(best, 0.99999)[0, 0]) == 7.0


def test_greedy_takes_the_first_of_the_most_probable():
    logits = np.zeros(PADDED, np.float32)
    logits[[4, 9]] = 2.0
    logits[30] = 5.0  # padding of the vocabulary
    assert set(draws(Sampling(), logits, 3).tolist()) == {4}


def test_a_draw_depends_on_seed_row_and_position_alone():
    how = SAMPLINGS["temperature"]
    assert (draws(how) == draws(how)).all()
    assert (draws(how, num=8) == draws(how)[:8]).all()
    assert (draws(how) != draws(Sampling(temperature=0.7, seed=1))).any()
    same_row = jax.jit(partial(sample, how=how, vocab_size=VOCAB))(
        jnp.broadcast_to(LOGITS, (64, PADDED)), jnp.zeros(64, jnp.int32), jnp.arange(64, dtype=jnp.int32)
    )
    assert len(set(np.asarray(same_row).tolist())) > 5


@pytest.mark.parametrize("name", ["greedy", "top_p", "top_k and top_p"])
def test_shards_of_the_vocabulary_give_the_same_tokens(name):
    how = SAMPLINGS.get(name, Sampling())
    mesh, rows = MeshLayout(tensor=4).build(jax.devices()[:4]), jnp.arange(64, dtype=jnp.int32)
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(64, PADDED)), jnp.float32)

    def local(logits, rows):
        with tracing(ParallelContext(mesh=mesh, rules=AxisRules(preset=("megatron",)), manual=True)):
            return sample(logits, rows, rows, how, VOCAB)

    specs = (PartitionSpec(None, "tensor"), PartitionSpec())
    sharded = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))
    whole = jax.jit(lambda logits, rows: sample(logits, rows, rows, how, VOCAB))
    np.testing.assert_array_equal(sharded(logits, rows), whole(logits, rows))


def test_settings_that_make_no_sense_are_listed_together():
    with pytest.raises(ConfigError) as error:
        Sampling(temperature=-1, top_k=0, top_p=0, seed=-1)
    assert [line for line in str(error.value).splitlines() if line[2] != " "] == [
        "these settings of sampling are invalid:", "  temperature", "  top_k", "  top_p", "  seed",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="temperature 0 selects the most probable token, whatever top_k"):
        Sampling(top_k=3)
    with pytest.raises(ConfigError, match="nan is not 0 or more"):
        Sampling(temperature=float("nan"))
