"""The loss of a projection in chunks: any length, any cotangent, and what `auto` selects."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar.train import chunks, token_loss
from meshpar.train.chunks import MIN_BYTES, MIN_TOKENS, chunk_length, describe_chunk
from meshpar.train.projected import summed_over_logits
from tests.comparison import largest_difference

ROWS = 2
SEQ = 13
WIDTH = 8
VOCAB = 29
PADDED = 32


def drawn(dtype: Any = jnp.float64, scale: float = 1.0) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(scale * rng.normal(size=(ROWS, SEQ, WIDTH)), dtype)
    head = jnp.asarray(rng.normal(size=(WIDTH, PADDED)), dtype)
    tokens = {
        "targets": jnp.asarray(rng.integers(0, VOCAB, (ROWS, SEQ)), jnp.int32),
        "weights": jnp.asarray(rng.random((ROWS, SEQ)), dtype),
    }
    return hidden, head, tokens


def weighted(logits: jax.Array, tokens: Any, shared: None) -> jax.Array:
    nll = token_loss.cross_entropy(logits, tokens["targets"], VOCAB, 0.1, 1e-2)
    return (nll * tokens["weights"].astype(nll.dtype)).sum()


def loss(hidden: jax.Array, head: jax.Array, tokens: Any, chunk: Any) -> jax.Array:
    return summed_over_logits(lambda axes: weighted, hidden, head, tokens, None, chunk)


def difference(chunk: Any) -> float:
    """The relative difference of the squared loss and its gradients; because of the square, the cotangent is not 1."""

    def square(hidden, head, chunk):
        return loss(hidden, head, drawn()[2], chunk) ** 2

    hidden, head, _ = drawn()
    found, want = (jax.value_and_grad(square, (0, 1))(hidden, head, way) for way in (chunk, "none"))
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(want))
    return largest_difference(found, want) / scale


@pytest.mark.parametrize("chunk", [1, 2, 5, 6, 13, 24, 26, 100])
def test_chunks_of_any_length_change_no_gradient(chunk, float64):
    assert difference(chunk) < 1e-14


def test_planted_an_ignored_cotangent_is_seen(float64, monkeypatch):
    unscaled = jax.custom_vjp(chunks._summed.fun, nondiff_argnums=(0, 1))
    unscaled.defvjp(chunks._with_gradients, lambda cost, length, gradients, cotangent: (*gradients, None, None))
    monkeypatch.setattr(chunks, "_summed", unscaled)
    assert difference(6) > 1e-2
    assert difference("none") == 0


def test_arrays_of_the_tokens_have_no_gradient(float64):
    hidden, head, tokens = drawn()

    def of_weights(weights):
        return loss(hidden, head, tokens | {"weights": weights}, 6)

    assert not np.any(jax.grad(of_weights)(tokens["weights"]))


def test_the_heads_gradient_is_summed_in_float32(monkeypatch):
    """Each chunk's gradient is rounded once, as without chunks; a sum in bfloat16 is rounded for each chunk."""
    hidden, head, tokens = drawn(jnp.bfloat16)
    exact = jax.grad(loss, 1)(hidden.astype(jnp.float32), head.astype(jnp.float32), tokens, "none")

    def error(chunk: Any) -> float:
        found = jax.grad(loss, 1)(hidden, head, tokens, chunk)
        assert found.dtype == jnp.bfloat16
        return float(jnp.linalg.norm(found.astype(jnp.float32) - exact) / jnp.linalg.norm(exact))

    assert error(2) < 1.2 * error("none")
    monkeypatch.setattr(chunks, "wide", lambda x: x)
    assert error(2) > 1.5 * error("none")


@given(st.integers(1, 4096), st.integers(1, 2**17), st.integers(1, 2**14), st.integers(1, 2**18))
def test_auto_makes_chunks_only_where_they_hold_less(rows, seq, hidden_size, vocab):
    length = chunk_length("auto", rows, seq, hidden_size, vocab)
    if length is None:
        return
    assert 1 <= length < seq
    held = (length * rows + hidden_size) * vocab
    assert held < rows * seq * vocab
    assert rows * (length + 1) > MIN_TOKENS
    assert 4 * rows * (length + 1) * vocab > MIN_BYTES


@pytest.mark.parametrize(
    ("chunk", "length"), [("none", None), (1, 1), (7, 1), (8, 1), (20, 2), (127, 15), (128, None), (10_000, None)]
)
def test_a_chunk_of_tokens_is_a_number_of_positions(chunk, length):
    assert chunk_length(chunk, rows=8, seq=16, hidden_size=4, vocab=32) == length


def test_the_description_says_what_is_held():
    describe = partial(describe_chunk, rows=8, seq=16, hidden_size=4, vocab=1024)
    assert describe("auto") == "one chunk: 512.00 KiB of logits"
    assert describe(24) == "6 chunks of 3 positions: 96.00 KiB of logits at a time, not 512.00 KiB"
    assert describe(8) == "16 chunks of 1 position: 32.00 KiB of logits at a time, not 512.00 KiB"
