"""The VAE of Flax's example: the reparameterization draws from a key."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tests.zoo import Zoo
from tests.zoo.parts import ROWS, wide

PIXELS = 64
LATENTS = 8


class Encoder(nn.Module):
    latents: int

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32, name="fc1")(x)
        x = nn.relu(x)
        mean_x = nn.Dense(self.latents, name="fc2_mean")(x)
        logvar_x = nn.Dense(self.latents, name="fc2_logvar")(x)
        return mean_x, logvar_x


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, z):
        z = nn.Dense(32, name="fc1")(z)
        z = nn.relu(z)
        return nn.Dense(PIXELS, name="fc2")(z)


class VAE(nn.Module):
    latents: int = LATENTS

    def setup(self):
        self.encoder = Encoder(self.latents)
        self.decoder = Decoder()

    def __call__(self, x, z_rng):
        mean, logvar = self.encoder(x)
        z = reparameterize(z_rng, mean, logvar)
        return self.decoder(z), mean, logvar


def reparameterize(rng, mean, logvar):
    std = jnp.exp(0.5 * logvar)
    eps = jax.random.normal(rng, logvar.shape)
    return mean + eps * std


@jax.vmap
def kl_divergence(mean, logvar):
    return -0.5 * jnp.sum(1 + logvar - jnp.square(mean) - jnp.exp(logvar))


@jax.vmap
def binary_cross_entropy_with_logits(logits, labels):
    logits = nn.log_sigmoid(logits)
    return -jnp.sum(labels * logits + (1.0 - labels) * jnp.log(-jnp.expm1(logits)))


def build() -> Zoo:
    def init(key):
        return VAE().init(key, jnp.ones((1, PIXELS)), key)["params"]

    def loss(params, batch, key):
        recon_x, mean, logvar = VAE().apply({"params": params}, batch["image"], key)
        bce_loss = binary_cross_entropy_with_logits(recon_x, batch["image"]).mean()
        kld_loss = kl_divergence(mean, logvar).mean()
        return bce_loss + kld_loss, {"bce": bce_loss, "kld": kld_loss}

    dims = {
        "**fc1.kernel": ("embed", "mlp"),
        "**fc1.bias": ("mlp",),
        "encoder.fc2_*.kernel": ("mlp", "embed"),
        "encoder.fc2_*.bias": ("embed",),
        "decoder.fc2.kernel": ("mlp", "embed"),
        "decoder.fc2.bias": ("embed",),
    }
    images = np.random.default_rng(0).random((ROWS, PIXELS))
    return Zoo("vae", wide(init), loss, {"image": images}, draws=True, dims=dims)
