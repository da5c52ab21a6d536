"""BERT's task on synthetic sentences: a small encoder in Flax Linen restores hidden tokens."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

VOCAB = 64
MASK, PAD = 1, 0
LENGTH = 24


def rows(num: int = 4096, seed: int = 0) -> dict[str, np.ndarray]:
    """Sentences that count upwards from a random word, by a step of one or two; the shorter ones are padded."""
    draw = np.random.default_rng(seed)
    first, step = draw.integers(VOCAB - 2, size=(num, 1)), draw.integers(1, 3, size=(num, 1))
    tokens = 2 + (first + step * np.arange(LENGTH)) % (VOCAB - 2)
    length = draw.integers(LENGTH // 2, LENGTH + 1, size=(num, 1))
    return {"tokens": np.where(np.arange(LENGTH) < length, tokens, PAD)}


def named(*dims):
    return nn.with_partitioning(nn.initializers.xavier_uniform(), dims)


class Encoder(nn.Module):
    width: int = 64
    heads: int = 4
    layers: int = 2

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
        return nn.LayerNorm()(x) @ table.T
