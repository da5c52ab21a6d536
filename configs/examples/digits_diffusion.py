"""Diffusion of digits: a small U-net in Flax Linen tells the noise in a noisy picture (DDPM, arXiv:2006.11239)."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

DRAWS = 4


def rows(split: str = "train") -> dict[str, np.ndarray]:
    """Each picture with noise of several levels: sqrt(1 - level) image + sqrt(level) noise. The noise is the label."""
    images = load_digits().images[:1400] if split == "train" else load_digits().images[1400:]
    images = np.repeat(images / 8 - 1, DRAWS, axis=0)[..., None].astype(np.float32)
    draw = np.random.default_rng(0 if split == "train" else 1)
    level = draw.uniform(0.05, 0.95, len(images)).astype(np.float32)
    noise = draw.normal(size=images.shape).astype(np.float32)
    share = level[:, None, None, None]
    return {"noisy": np.sqrt(1 - share) * images + np.sqrt(share) * noise, "level": level, "noise": noise}


def conv(features, *dims):
    return nn.Conv(
        features, (3, 3), kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, None, *dims))
    )


class Block(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, level):
        y = conv(self.features, "embed", "mlp")(nn.swish(nn.LayerNorm()(x)))
        y = y + nn.Dense(self.features)(level)[:, None, None]
        y = conv(self.features, "mlp", "embed")(nn.swish(nn.LayerNorm()(y)))
        return y + nn.Dense(self.features)(x)


class UNet(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, noisy, level):
        turns = level[:, None] * 2.0 ** jnp.arange(6)
        level = nn.swish(nn.Dense(4 * self.width)(jnp.concatenate([jnp.sin(turns), jnp.cos(turns)], -1)))
        whole = Block(self.width)(conv(self.width, None, None)(noisy), level)  # 8 x 8
        half = Block(2 * self.width)(nn.avg_pool(whole, (2, 2), (2, 2)), level)  # 4 x 4
        half = Block(2 * self.width)(half, level)
        up = jnp.repeat(jnp.repeat(half, 2, axis=1), 2, axis=2)
        x = Block(self.width)(jnp.concatenate([whole, up], axis=-1), level)
        return conv(1, None, None)(nn.swish(nn.LayerNorm()(x)))
