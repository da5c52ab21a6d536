"""Handwritten digits by a small residual network with batch normalization, in Flax NNX. Needs scikit-learn."""

import jax
import numpy as np
from flax import nnx


def rows(split: str = "train") -> dict[str, np.ndarray]:
    """Scikit-learn's 1,797 digits: the last 397 are the test set."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    part = slice(0, 1400) if split == "train" else slice(1400, None)
    return {"image": (digits.images[part, ..., None] / 16).astype(np.float32), "label": digits.target[part]}


def convolution(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Conv:
    init = nnx.with_partitioning(nnx.initializers.he_normal(), (None, None, "embed", "mlp"))
    return nnx.Conv(inputs, outputs, (3, 3), use_bias=False, kernel_init=init, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.first = convolution(width, width, rngs)
        self.second = convolution(width, width, rngs)
        self.norms = nnx.List([nnx.BatchNorm(width, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norms[0](self.first(x)))
        return nnx.relu(x + self.norms[1](self.second(y)))


class ResNet(nnx.Module):
    def __init__(self, width: int = 16, blocks: int = 2, *, rngs: nnx.Rngs):
        self.stem = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(blocks)])
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = nnx.relu(self.stem(image))
        for block in self.blocks:
            x = block(x)
        return self.head(x.max(axis=(1, 2)))
