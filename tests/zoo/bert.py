"""BERT's pretraining, in Linen: masked tokens gathered from each row, token types, weights, the next sentence."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tests.zoo import Zoo
from tests.zoo.parts import ATTENTION, ROWS, SEQ, VOCAB, mlp, wide

WIDTH = 32
PREDICTIONS = 2


class Embeddings(nn.Module):
    def setup(self):
        init = nn.initializers.normal(0.02)
        self.word_embeddings = nn.Embed(VOCAB, WIDTH, embedding_init=init)
        self.position_embeddings = nn.Embed(SEQ, WIDTH, embedding_init=init)
        self.token_type_embeddings = nn.Embed(2, WIDTH, embedding_init=init)
        self.layer_norm = nn.LayerNorm(epsilon=1e-12)

    def __call__(self, input_ids, type_ids):
        positions = jnp.broadcast_to(jnp.arange(input_ids.shape[-1])[None], input_ids.shape)
        x = self.word_embeddings(input_ids) + self.position_embeddings(positions)
        return self.layer_norm(x + self.token_type_embeddings(type_ids))


class Layer(nn.Module):
    """Its norms come after the residuals."""

    @nn.compact
    def __call__(self, x, mask):
        y = nn.MultiHeadDotProductAttention(num_heads=4, name="self_attention")(x, mask=mask)
        x = nn.LayerNorm(epsilon=1e-12, name="attention_layer_norm")(x + y)
        y = nn.gelu(nn.Dense(2 * WIDTH, name="intermediate")(x), approximate=False)
        y = nn.Dense(WIDTH, name="output")(y)
        return nn.LayerNorm(epsilon=1e-12, name="output_layer_norm")(x + y)


class BertForPreTraining(nn.Module):
    num_layers: int = 2

    @nn.compact
    def __call__(self, input_ids, input_mask, type_ids, masked_lm_positions):
        embeddings = Embeddings(name="embeddings")
        x = embeddings(input_ids, type_ids)
        mask = input_mask[:, None, None, :].astype(bool)
        for i in range(self.num_layers):
            x = Layer(name=f"layer_{i}")(x, mask)
        pooled = jnp.tanh(nn.Dense(WIDTH, name="pooler")(x[:, 0]))
        next_sentence_logits = nn.Dense(2, name="seq_relationship")(pooled)
        masked = jnp.take_along_axis(x, masked_lm_positions[:, :, None], axis=1)
        masked = nn.gelu(nn.Dense(WIDTH, name="transform")(masked), approximate=False)
        masked = nn.LayerNorm(epsilon=1e-12, name="transform_layer_norm")(masked)
        bias = self.param("output_bias", nn.initializers.zeros, (VOCAB,), masked.dtype)
        return embeddings.word_embeddings.attend(masked) + bias, next_sentence_logits


def build() -> Zoo:
    model = BertForPreTraining()
    rng = np.random.default_rng(0)
    lengths = rng.integers(SEQ // 2, SEQ + 1, ROWS)
    weights = (rng.random((ROWS, PREDICTIONS)) < 0.7).astype(np.float64)
    batch = {
        "input_ids": rng.integers(0, VOCAB, (ROWS, SEQ), np.int32),
        "input_mask": (np.arange(SEQ) < lengths[:, None]).astype(np.int32),
        "type_ids": rng.integers(0, 2, (ROWS, SEQ), np.int32),
        "masked_lm_positions": rng.integers(0, SEQ // 2, (ROWS, PREDICTIONS), np.int32),
        "masked_lm_ids": rng.integers(0, VOCAB, (ROWS, PREDICTIONS), np.int32),
        "masked_lm_weights": weights,
        "next_sentence_labels": rng.integers(0, 2, ROWS, np.int32),
    }
    inputs = ("input_ids", "input_mask", "type_ids", "masked_lm_positions")

    def init(key):
        return model.init(key, *(jnp.ones_like(batch[name][:1]) for name in inputs))["params"]

    def loss(params, batch, key):
        masked_lm_logits, next_sentence_logits = model.apply({"params": params}, *(batch[name] for name in inputs))
        log_probs = nn.log_softmax(masked_lm_logits)
        nll = -jnp.take_along_axis(log_probs, batch["masked_lm_ids"][..., None], axis=-1)[..., 0]
        weights = batch["masked_lm_weights"]
        masked_lm_loss = jnp.sum(nll * weights) / (jnp.sum(weights) + 1e-5)
        labels = jax.nn.one_hot(batch["next_sentence_labels"], 2, dtype=nll.dtype)
        next_sentence_loss = -jnp.mean(jnp.sum(labels * nn.log_softmax(next_sentence_logits), axis=-1))
        metrics = {"masked_lm_loss": masked_lm_loss, "next_sentence_loss": next_sentence_loss}
        return masked_lm_loss + next_sentence_loss, metrics

    dims = {
        "**word_embeddings.embedding": ("vocab", "embed"),
        "**position_embeddings.embedding": ("positions", "embed"),
        "**token_type_embeddings.embedding": ("types", "embed"),
        "output_bias": ("vocab",),
        **ATTENTION,
        **mlp("intermediate", "output"),
        "pooler.kernel": ("embed", "unnamed"),
        "pooler.bias": ("unnamed",),
        "transform.kernel": ("embed", "unnamed"),
        "transform.bias": ("unnamed",),
        "seq_relationship.kernel": ("embed", "types"),
        "seq_relationship.bias": ("types",),
        "**layer_norm.*": ("embed",),
    }
    return Zoo("bert", wide(init), loss, batch, dims=dims, rules={"types": (), "unnamed": ()})
