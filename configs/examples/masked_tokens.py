"""BERT's task on synthetic sentences: a small encoder in Flax Linen restores hidden tokens, or classifies a row."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

VOCAB = 64
PAD, MASK, BREAK = range(3)
WORDS = VOCAB - 3
LENGTH = 24


def sentences(draw: np.random.Generator, step: np.ndarray, length: int) -> np.ndarray:
    """Words that count upwards by a step [rows, 1], each row from a random word."""
    return 3 + (draw.integers(WORDS, size=step.shape) + step * np.arange(length)) % WORDS


def rows(num: int = 4096, seed: int = 0) -> dict[str, np.ndarray]:
    """Sentences that count by one or two; the shorter ones are padded."""
    draw = np.random.default_rng(seed)
    tokens = sentences(draw, draw.integers(1, 3, size=(num, 1)), LENGTH)
    length = draw.integers(LENGTH // 2, LENGTH + 1, size=(num, 1))
    return {"tokens": np.where(np.arange(LENGTH) < length, tokens, PAD)}


def named(*dims):
    return nn.with_partitioning(nn.initializers.xavier_uniform(), dims)


class Encoder(nn.Module):
    width: int = 64
    heads: int = 4
    layers: int = 2
    classes: int | None = None

    @nn.compact
    def __call__(self, tokens):
        table = self.param("table", nn.with_partitioning(nn.initializers.normal(0.1), ("vocab", "embed")), (VOCAB, 64))
        place = self.param("place", nn.initializers.normal(0.1), (LENGTH, self.width))
        x = jnp.take(table, tokens, axis=0) + place
        real = (tokens != PAD)[:, None, None, :]
        for _ in range(self.layers):
            y = nn.LayerNorm()(x)
            size = (self.heads, self.width // self.heads)
            q, k, v = (nn.DenseGeneral(size, kernel_init=named("embed", "heads", None))(y) for _ in range(3))
            y = nn.dot_product_attention(q, k, v, mask=real)
            x = x + nn.DenseGeneral(self.width, axis=(-2, -1), kernel_init=named("heads", None, "embed"))(y)
            y = nn.gelu(nn.Dense(2 * self.width, kernel_init=named("embed", "mlp"))(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.width, kernel_init=named("mlp", "embed"))(y)
        x = nn.LayerNorm()(x)
        if self.classes:
            pooled = x.mean(axis=1, where=(tokens != PAD)[..., None])
            return nn.Dense(self.classes, kernel_init=named("embed", None), name="head")(pooled)
        return x @ table.T
