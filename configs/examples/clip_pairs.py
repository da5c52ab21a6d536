"""CLIP's task on synthetic pairs: a sentence of words that name the colours of a picture's quarters, in Flax Linen."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

COLOURS = 8


def rows(num: int = 4096, seed: int = 0) -> dict[str, np.ndarray]:
    """Noisy pictures of 4 x 4 pixels with a colour in each quarter, and the names of the colours."""
    draw = np.random.default_rng(seed)
    words = draw.integers(COLOURS, size=(num, 4))
    palette = np.random.default_rng(7).normal(size=(COLOURS, 3))
    quarters = palette[words].reshape(num, 2, 2, 3).repeat(2, axis=1).repeat(2, axis=2)
    picture = quarters + draw.normal(0, 0.2, size=quarters.shape)
    return {"picture": picture.astype(np.float32), "words": words}


class Tower(nn.Module):
    features: int = 32

    @nn.compact
    def __call__(self, x):
        up = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        down = nn.with_partitioning(nn.initializers.lecun_normal(), ("mlp", "embed"))
        x = nn.gelu(nn.Dense(128, kernel_init=up)(x))
        return nn.Dense(self.features, kernel_init=down)(x)


class CLIP(nn.Module):
    @nn.compact
    def __call__(self, picture, words):
        scale = self.param("scale", nn.initializers.constant(2.0), ())
        table = self.param("words", nn.initializers.normal(0.5), (4, COLOURS, 16))
        named = jnp.stack([jnp.take(table[i], words[:, i], axis=0) for i in range(4)], axis=1)
        flat = [x.reshape(x.shape[0], -1) for x in (picture, named)]
        return Tower(name="picture")(flat[0]), Tower(name="text")(flat[1]), jnp.exp(scale)
