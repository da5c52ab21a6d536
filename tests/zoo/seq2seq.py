"""Flax's seq2seq example: LSTMs under `nn.scan`, whose carry stops at a row's end, and which feeds back its samples."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.zoo import Zoo
from tests.zoo.parts import ROWS, wide

VOCAB = 16
HIDDEN = 32
EOS = 1


class EncoderLSTM(nn.Module):
    @functools.partial(
        nn.scan, variable_broadcast="params", in_axes=1, out_axes=1, split_rngs={"params": False}
    )  # fmt: skip
    @nn.compact
    def __call__(self, carry, x):
        lstm_state, is_eos = carry
        new_lstm_state, y = nn.LSTMCell(HIDDEN)(lstm_state, x)

        def select_carried_state(new_state, old_state):
            return jnp.where(is_eos[:, np.newaxis], old_state, new_state)

        carried_lstm_state = tuple(select_carried_state(*s) for s in zip(new_lstm_state, lstm_state, strict=True))
        is_eos = jnp.logical_or(is_eos, x[:, EOS].astype(bool))
        return (carried_lstm_state, is_eos), y


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        state = jnp.zeros((inputs.shape[0], HIDDEN), inputs.dtype)
        carry = ((state, state), jnp.zeros(inputs.shape[0], dtype=bool))
        (final_state, _), _ = EncoderLSTM()(carry, inputs)
        return final_state


class DecoderLSTM(nn.Module):
    @functools.partial(
        nn.scan, variable_broadcast="params", in_axes=1, out_axes=1,
        split_rngs={"params": False, "lstm": True, "sampling": True},
    )  # fmt: skip
    @nn.compact
    def __call__(self, carry, x):
        lstm_state, last_prediction = carry
        teacher = jax.random.bernoulli(self.make_rng("sampling"), 0.5, (x.shape[0], 1))  # scheduled sampling
        x = jnp.where(teacher, x, last_prediction)
        lstm_state, y = nn.LSTMCell(HIDDEN)(lstm_state, x)
        logits = nn.Dense(features=VOCAB)(y)
        predicted_token = jax.random.categorical(self.make_rng("lstm"), logits)
        prediction = jax.nn.one_hot(predicted_token, VOCAB, dtype=x.dtype)
        return (lstm_state, prediction), (logits, prediction)


class Seq2seq(nn.Module):
    @nn.compact
    def __call__(self, encoder_inputs, decoder_inputs):
        init_state = Encoder()(encoder_inputs)
        init_carry = (init_state, decoder_inputs[:, 0])
        _, (logits, predictions) = DecoderLSTM()(init_carry, decoder_inputs[:, :-1])
        return logits, predictions


def mask_sequences(sequence_batch, lengths):
    """Sets positions beyond the length of each sequence to 0."""
    return sequence_batch * (lengths[:, np.newaxis] > np.arange(sequence_batch.shape[1])[np.newaxis])


def build() -> Zoo:
    rng = np.random.default_rng(0)
    batch = {
        "query": rng.integers(2, VOCAB, (ROWS, 6), np.int32),
        "answer": rng.integers(2, VOCAB, (ROWS, 5), np.int32),
        "length": rng.integers(2, 5, ROWS, np.int32),
    }
    batch["query"][np.arange(ROWS), rng.integers(2, 6, ROWS)] = EOS

    def encoded(tokens):
        return jax.nn.one_hot(tokens, VOCAB, dtype=jnp.result_type(float))

    def init(key):
        query, answer = (jnp.zeros((1, length, VOCAB), jnp.float32) for length in (6, 5))
        return Seq2seq().init({"params": key, "lstm": key, "sampling": key}, query, answer)["params"]

    def loss(params, batch, key):
        lstm, sampling = jax.random.split(key)
        query, answer = encoded(batch["query"]), encoded(batch["answer"])
        logits, _ = Seq2seq().apply({"params": params}, query, answer, rngs={"lstm": lstm, "sampling": sampling})
        xe = optax.softmax_cross_entropy(logits, answer[:, 1:])
        return jnp.mean(mask_sequences(xe, batch["length"]))

    dims = {
        "**LSTMCell_0.i*.kernel": ("embed", "mlp"),
        "**LSTMCell_0.h*.kernel": ("embed", "mlp"),
        "**LSTMCell_0.h*.bias": ("mlp",),
        "**Dense_0.kernel": ("mlp", "embed"),
        "**Dense_0.bias": ("embed",),
    }
    return Zoo("seq2seq", wide(init), loss, batch, draws=True, dims=dims)
