"""The decoder of Flax's lm1b example, in NNX: a list of blocks, and dropout whose keys are carried."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from tests.zoo import Zoo
from tests.zoo.parts import SEQ, VOCAB, accuracy, cross_entropy, sentences, wide

WIDTH = 32
HEADS = 4


def kernel(*names):
    return nnx.with_partitioning(nnx.initializers.xavier_uniform(), names)


def vector(init, *names):
    return nnx.with_partitioning(init, names)


def layer_norm(rngs):
    ones, zeros = nnx.initializers.ones_init(), nnx.initializers.zeros_init()
    return nnx.LayerNorm(WIDTH, scale_init=vector(ones, "embed"), bias_init=vector(zeros, "embed"), rngs=rngs)


class MlpBlock(nnx.Module):
    def __init__(self, width: int, mlp_dim: int, dropout_rate: float, *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(1e-6)
        self.linear1 = nnx.Linear(
            width, mlp_dim, kernel_init=kernel("embed", "mlp"), bias_init=vector(normal, "mlp"), rngs=rngs
        )
        self.linear2 = nnx.Linear(
            mlp_dim, width, kernel_init=kernel("mlp", "embed"), bias_init=vector(normal, "embed"), rngs=rngs
        )
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.linear1(x))
        return self.dropout(self.linear2(self.dropout(x)))


class EncoderDecoder1DBlock(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.ln1 = layer_norm(rngs)
        self.ln2 = layer_norm(rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=HEADS,
            in_features=WIDTH,
            qkv_features=WIDTH,
            kernel_init=kernel("embed", "heads", "head_dim"),
            out_kernel_init=kernel("heads", "head_dim", "embed"),
            use_bias=False,
            broadcast_dropout=False,
            dropout_rate=0.1,
            deterministic=False,
            decode=False,
            rngs=rngs,
        )
        self.mlp = MlpBlock(WIDTH, 2 * WIDTH, 0.1, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, inputs, decoder_mask):
        x = self.attention(self.ln1(inputs), mask=decoder_mask)
        x = self.dropout(x) + inputs
        return x + self.mlp(self.ln2(x))


class TransformerLM(nnx.Module):
    """Its positions are learned."""

    def __init__(self, num_layers: int = 2, *, rngs: nnx.Rngs):
        table = vector(nnx.initializers.normal(1.0), "vocab", "embed")
        param_dtype = jnp.result_type(float)  # `attend` computes in the dtype in which the table was made
        self.embed = nnx.Embed(VOCAB, WIDTH, param_dtype=param_dtype, embedding_init=table, rngs=rngs)
        positions = nnx.initializers.normal(0.02)(rngs.params(), (1, SEQ, WIDTH))
        self.positions = nnx.Param(positions, out_sharding=(None, "positions", "embed"))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.blocks = nnx.List([EncoderDecoder1DBlock(rngs=rngs) for _ in range(num_layers)])
        self.norm = layer_norm(rngs)

    def __call__(self, tokens):
        shifted = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        x = self.dropout(self.embed(shifted) + self.positions[...])
        mask = nnx.combine_masks(nnx.make_attention_mask(tokens > 0, tokens > 0), nnx.make_causal_mask(tokens))
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x)) / WIDTH**0.5


def build() -> Zoo:
    with nnx.use_eager_sharding(False):
        graph = nnx.graphdef(nnx.eval_shape(lambda: TransformerLM(rngs=nnx.Rngs(0))))

    def state(key, *filters):
        return nnx.state(TransformerLM(rngs=nnx.Rngs(key)), *filters)

    def loss(params, batch, key, carried):
        model = nnx.merge(graph, params, carried)
        logits = model(batch["tokens"])
        metrics = {"accuracy": accuracy(logits, batch["tokens"])}
        return cross_entropy(logits, batch["tokens"]), metrics, nnx.state(model, nnx.Not(nnx.Param))

    return Zoo(
        "lm1b_nnx", wide(lambda key: state(key, nnx.Param)), loss, {"tokens": sentences()["tokens"]},
        carried=lambda key: state(key, nnx.Not(nnx.Param)), rules={"unnamed": ()},
    )  # fmt: skip
