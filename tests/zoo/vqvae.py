"""A VQ-VAE in Linen: the nearest code, a `custom_vjp` for gradients straight through, a codebook of moving averages."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.zoo import Zoo
from tests.zoo.parts import images, wide

CODES = 16
FEATURES = 8


@jax.custom_vjp
def straight_through(z, codes):
    """The codes, with the gradient of z."""
    return codes


straight_through.defvjp(lambda z, codes: (codes, None), lambda _, g: (g, jnp.zeros_like(g)))


class ResidualBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Conv(16, (3, 3), use_bias=False, name="conv1")(nn.relu(x))
        return x + nn.Conv(x.shape[-1], (1, 1), use_bias=False, name="conv2")(nn.relu(y))


class VectorQuantizerEMA(nn.Module):
    """Sonnet's: codes are averages of the features that chose them."""

    decay: float = 0.9

    @nn.compact
    def __call__(self, z):
        def first(key):
            return jax.random.normal(key, (CODES, FEATURES))

        codebook = self.variable("codebook", "embedding", lambda: first(self.make_rng("params")))
        counts = self.variable("codebook", "counts", lambda: jnp.ones(CODES))
        sums = self.variable("codebook", "sums", lambda: codebook.value)
        flat = z.reshape(-1, FEATURES)
        distances = (flat**2).sum(1, keepdims=True) - 2 * flat @ codebook.value.T + (codebook.value**2).sum(1)
        indices = jnp.argmin(distances, axis=1)
        quantized = codebook.value[indices].reshape(z.shape)
        one_hot = jax.nn.one_hot(indices, CODES, dtype=z.dtype)
        frozen = jax.lax.stop_gradient(flat)
        counts.value = self.decay * counts.value + (1 - self.decay) * one_hot.sum(0)
        sums.value = self.decay * sums.value + (1 - self.decay) * one_hot.T @ frozen
        total = counts.value.sum()
        smoothed = (counts.value + 1e-5) / (total + CODES * 1e-5) * total
        codebook.value = sums.value / smoothed[:, None]
        commitment = jnp.mean(jnp.square(jax.lax.stop_gradient(quantized) - z))
        usage = one_hot.mean(0)
        perplexity = jnp.exp(-jnp.sum(usage * jnp.log(usage + 1e-10)))
        return straight_through(z, jax.lax.stop_gradient(quantized)), commitment, perplexity


class VQVAE(nn.Module):
    @nn.compact
    def __call__(self, x):
        channels = x.shape[-1]
        z = nn.relu(nn.Conv(16, (4, 4), strides=(2, 2), name="down")(x))
        z = nn.Conv(FEATURES, (1, 1), name="to_codes")(ResidualBlock(name="encode")(z))
        z, commitment, perplexity = VectorQuantizerEMA(name="quantizer")(z)
        x = ResidualBlock(name="decode")(nn.Conv(16, (3, 3), name="from_codes")(z))
        return nn.ConvTranspose(channels, (4, 4), strides=(2, 2), name="up")(x), commitment, perplexity


def build() -> Zoo:
    model = VQVAE()

    def variables(key):
        return model.init(key, jnp.ones((1, 8, 8, 3)))

    def loss(params, batch, key, carried):
        variables = {"params": params, **carried}
        (decoded, commitment, perplexity), new = model.apply(variables, batch["image"], mutable=["codebook"])
        reconstruction = jnp.mean(jnp.square(decoded - batch["image"]))
        metrics = {"reconstruction": reconstruction, "perplexity": perplexity}
        return reconstruction + 0.25 * commitment, metrics, new

    dims = {
        "down.kernel": ("height", "width", "channels", "mlp"),
        "**conv1.kernel": ("height", "width", "embed", "mlp"),
        "**conv2.kernel": ("height", "width", "mlp", "embed"),
        "to_codes.kernel": ("height", "width", "embed", "codes"),
        "from_codes.kernel": ("height", "width", "codes", "mlp"),
        "up.kernel": ("height", "width", "embed", "channels"),
        "down.bias": ("mlp",),
        "from_codes.bias": ("mlp",),
        "to_codes.bias": ("codes",),
        "up.bias": ("channels",),
    }
    rules = {"height": (), "width": (), "channels": (), "codes": (), "unnamed": ()}
    return Zoo(
        "vqvae", wide(lambda key: variables(key)["params"]), loss, {"image": images(8)["image"]},
        carried=wide(lambda key: {"codebook": variables(key)["codebook"]}), dims=dims, rules=rules,
    )  # fmt: skip
