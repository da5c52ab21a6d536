"""The decoder of Flax's lm1b example, in Linen, with the names of dims in its initializers."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from tests.zoo import Zoo
from tests.zoo.parts import SEQ, VOCAB, sentences, wide


@struct.dataclass
class TransformerConfig:
    vocab_size: int = VOCAB
    emb_dim: int = 32
    num_heads: int = 4
    num_layers: int = 2
    qkv_dim: int = 32
    mlp_dim: int = 64
    max_len: int = 16
    dropout_rate: float = 0.1
    attention_dropout_rate: float = 0.1
    deterministic: bool = False


def named(init, *names):
    return nn.with_logical_partitioning(init, names)


def shift_right(x):
    padded = jnp.pad(x, [(0, 0), (1, 0)], constant_values=x.dtype.type(0))
    return padded[:, :-1]


def sinusoids(max_len, width, min_scale=1.0, max_scale=10000.0):
    position = np.arange(0, max_len)[:, np.newaxis]
    scale_factor = -np.log(max_scale / min_scale) / (width // 2 - 1)
    div_term = min_scale * np.exp(np.arange(0, width // 2) * scale_factor)
    return np.concatenate([np.sin(position * div_term), np.cos(position * div_term)], axis=1)[np.newaxis]


class AddPositionEmbs(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs):
        length = inputs.shape[1]
        return inputs + jnp.asarray(sinusoids(self.config.max_len, inputs.shape[-1]))[:, :length, :]


class MlpBlock(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs):
        config = self.config
        xavier, normal = nn.initializers.xavier_uniform(), nn.initializers.normal(stddev=1e-6)
        x = nn.Dense(config.mlp_dim, kernel_init=named(xavier, "embed", "mlp"), bias_init=named(normal, "mlp"))(inputs)
        x = nn.relu(x)
        x = nn.with_logical_constraint(x, ("batch", "seq", "mlp"))
        x = nn.Dropout(rate=config.dropout_rate)(x, deterministic=config.deterministic)
        width = inputs.shape[-1]
        output = nn.Dense(width, kernel_init=named(xavier, "mlp", "embed"), bias_init=named(normal, "embed"))(x)
        return nn.Dropout(rate=config.dropout_rate)(output, deterministic=config.deterministic)


class EncoderDecoder1DBlock(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs, decoder_mask=None):
        config = self.config
        xavier = nn.initializers.xavier_uniform()
        x = norm()(inputs)
        x = nn.MultiHeadDotProductAttention(
            num_heads=config.num_heads,
            qkv_features=config.qkv_dim,
            kernel_init=named(xavier, "embed", "heads", "head_dim"),
            out_kernel_init=named(xavier, "heads", "head_dim", "embed"),
            use_bias=False,
            broadcast_dropout=False,
            dropout_rate=config.attention_dropout_rate,
            deterministic=config.deterministic,
        )(x, mask=decoder_mask)
        x = nn.Dropout(rate=config.dropout_rate)(x, deterministic=config.deterministic)
        x = x + inputs
        return x + MlpBlock(config)(norm()(x))


def norm():
    scale, bias = nn.initializers.ones_init(), nn.initializers.zeros_init()
    return nn.LayerNorm(scale_init=named(scale, "embed"), bias_init=named(bias, "embed"))


class Decoder(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs, decoder_mask):
        config = self.config
        init = named(nn.initializers.normal(stddev=1.0), "vocab", "embed")
        output_embed = nn.Embed(config.vocab_size, config.emb_dim, embedding_init=init)
        y = output_embed(shift_right(inputs.astype("int32")))
        y = AddPositionEmbs(config, name="posembed_output")(y)
        y = nn.Dropout(rate=config.dropout_rate)(y, deterministic=config.deterministic)
        for lyr in range(config.num_layers):
            y = EncoderDecoder1DBlock(config, name=f"encoderdecoderblock_{lyr}")(y, decoder_mask)
        y = norm()(y)
        logits = output_embed.attend(y)
        return logits / jnp.sqrt(y.shape[-1]).astype(y.dtype)  # corrects the scale of the shared embedding


class TransformerLM(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs):
        decoder_mask = nn.combine_masks(nn.make_attention_mask(inputs > 0, inputs > 0), nn.make_causal_mask(inputs))
        return Decoder(config=self.config, name="decoder")(inputs, decoder_mask)


def compute_weighted_cross_entropy(logits, targets, weights, label_smoothing=0.1):
    vocab_size = logits.shape[-1]
    confidence = 1.0 - label_smoothing
    low_confidence = (1.0 - confidence) / (vocab_size - 1)
    constant = confidence * np.log(confidence) + (vocab_size - 1) * low_confidence * np.log(low_confidence + 1e-20)
    one_hot = jax.nn.one_hot(targets, vocab_size, dtype=logits.dtype)
    soft_targets = one_hot * (confidence - low_confidence) + low_confidence
    loss = -jnp.sum(soft_targets * nn.log_softmax(logits), axis=-1) - constant
    return (loss * weights).sum() / weights.sum()


def build() -> Zoo:
    model = TransformerLM(TransformerConfig())

    def init(key):
        return model.init({"params": key, "dropout": key}, jnp.ones((1, SEQ), jnp.int32))["params"]

    def loss(params, batch, key):
        inputs = batch["tokens"]
        weights = jnp.where(inputs > 0, 1.0, 0.0)
        logits = model.apply({"params": params}, inputs, rngs={"dropout": key})
        hits = jnp.equal(jnp.argmax(logits, axis=-1), inputs) * weights
        return compute_weighted_cross_entropy(logits, inputs, weights), {"accuracy": hits.sum() / weights.sum()}

    return Zoo("lm1b_linen", wide(init), loss, {"tokens": sentences()["tokens"]}, draws=True)
