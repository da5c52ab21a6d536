"""Handwritten digits, 8 x 8 pixels, by a small vision transformer in Flax Linen. Needs scikit-learn."""

import flax.linen as nn
import numpy as np


def rows(split: str = "train") -> dict[str, np.ndarray]:
    """Scikit-learn's 1,797 digits: the last 397 are the test set."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    part = slice(0, 1400) if split == "train" else slice(1400, None)
    return {"image": (digits.images[part] / 16).astype(np.float32), "label": digits.target[part]}


def noisy(row, rng):
    """The digit with a little noise, drawn for each row of each epoch."""
    return {**row, "image": row["image"] + rng.normal(0, 0.1, (8, 8)).astype(np.float32)}


def named(*dims):
    return nn.with_partitioning(nn.initializers.xavier_uniform(), dims)


class Block(nn.Module):
    width: int
    heads: int

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        qkv = nn.DenseGeneral(
            (3, self.heads, self.width // self.heads), kernel_init=named("embed", None, "heads", None)
        )(y)
        q, k, v = (qkv[:, :, i] for i in range(3))
        y = nn.dot_product_attention(q, k, v)
        x = x + nn.DenseGeneral(self.width, axis=(-2, -1), kernel_init=named("heads", None, "embed"))(y)
        y = nn.gelu(nn.Dense(2 * self.width, kernel_init=named("embed", "mlp"))(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width, kernel_init=named("mlp", "embed"))(y)


class ViT(nn.Module):
    width: int = 48
    heads: int = 4
    layers: int = 2
    patch: int = 2

    @nn.compact
    def __call__(self, image):
        rows, columns = (size // self.patch for size in image.shape[1:])
        x = image.reshape(-1, rows, self.patch, columns, self.patch).swapaxes(2, 3)
        x = nn.Dense(self.width, kernel_init=named(None, "embed"))(x.reshape(-1, rows * columns, self.patch**2))
        x = x + self.param("position", nn.initializers.normal(0.5), (rows * columns, self.width))
        for _ in range(self.layers):
            x = Block(self.width, self.heads)(x)
        return nn.Dense(10)(nn.LayerNorm()(x).mean(axis=1))
