"""A UNet that predicts noise, in Linen: group norm, a time's embedding, skips, resizing and transposed convolutions."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.zoo import Zoo
from tests.zoo.parts import images, wide

SIZE = 8


def timestep_embedding(timesteps, dim):
    half = dim // 2
    frequencies = jnp.exp(-jnp.log(10000.0) * jnp.arange(half) / half)
    args = timesteps[:, None] * frequencies[None]
    return jnp.concatenate([jnp.cos(args), jnp.sin(args)], axis=-1)


class ResnetBlock(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, temb):
        h = nn.swish(nn.GroupNorm(num_groups=4)(x))
        h = nn.Conv(self.features, (3, 3))(h)
        h = h + nn.Dense(self.features, name="temb")(nn.swish(temb))[:, None, None, :]
        h = nn.swish(nn.GroupNorm(num_groups=4)(h))
        h = nn.Conv(self.features, (3, 3))(h)
        if x.shape[-1] != self.features:
            x = nn.Dense(self.features, name="shortcut")(x)
        return x + h


class AttnBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        n, height, width, channels = x.shape
        h = nn.GroupNorm(num_groups=4)(x)
        q, k, v = (nn.Dense(channels, name=name)(h) for name in "qkv")
        weights = jnp.einsum("nhwc,nHWc->nhwHW", q, k) * channels**-0.5
        weights = nn.softmax(weights.reshape(n, height, width, height * width), axis=-1)
        h = jnp.einsum("nhwHW,nHWc->nhwc", weights.reshape(n, height, width, height, width), v)
        return x + nn.Dense(channels, name="proj_out")(h)


class UNet(nn.Module):
    features: int = 16
    channel_multipliers: tuple[int, ...] = (1, 2)

    @nn.compact
    def __call__(self, x, timesteps):
        channels = x.shape[-1]
        temb = timestep_embedding(timesteps, self.features)
        temb = nn.Dense(2 * self.features, name="temb0")(temb)
        temb = nn.Dense(2 * self.features, name="temb1")(nn.swish(temb))
        x = nn.Conv(self.features, (4, 4), strides=(2, 2), name="conv_in")(x)
        skips = []
        for i, multiplier in enumerate(self.channel_multipliers):
            x = ResnetBlock(self.features * multiplier, name=f"down{i}")(x, temb)
            skips.append(x)
            if i < len(self.channel_multipliers) - 1:
                x = nn.Conv(x.shape[-1], (3, 3), strides=(2, 2), name=f"downsample{i}")(x)
        x = AttnBlock(name="middle")(x)
        for i, multiplier in reversed(list(enumerate(self.channel_multipliers))):
            x = jnp.concatenate([x, skips.pop()], axis=-1)
            x = ResnetBlock(self.features * multiplier, name=f"up{i}")(x, temb)
            if i > 0:
                n, height, width, c = x.shape
                x = jax.image.resize(x, (n, 2 * height, 2 * width, c), "nearest")
                x = nn.Conv(c, (3, 3), name=f"upsample{i}")(x)
        x = nn.swish(nn.GroupNorm(num_groups=4, name="norm_out")(x))
        return nn.ConvTranspose(channels, (4, 4), strides=(2, 2), name="conv_out")(x)


def build() -> Zoo:
    model = UNet()

    def init(key):
        return model.init(key, jnp.ones((1, SIZE, SIZE, 3)), jnp.ones(1))["params"]

    def loss(params, batch, key):
        """DDPM's: a noise and a time for each image."""
        of_time, of_noise = jax.random.split(key)
        image = batch["image"]
        times = jax.random.randint(of_time, image.shape[:1], 0, 1000)
        noise = jax.random.normal(of_noise, image.shape)
        alphas = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, 1000))[times][:, None, None, None]
        noisy = jnp.sqrt(alphas) * image + jnp.sqrt(1 - alphas) * noise
        return jnp.mean(jnp.square(model.apply({"params": params}, noisy, times) - noise))

    dims = {
        "conv_in.kernel": ("height", "width", "channels", "embed"),
        "conv_out.kernel": ("height", "width", "embed", "channels"),
        "conv_out.bias": ("channels",),
        "**Conv_0.kernel": ("height", "width", "embed", "mlp"),
        "**Conv_0.bias": ("mlp",),
        "**Conv_1.kernel": ("height", "width", "mlp", "embed"),
        "**sample*.kernel": ("height", "width", "embed", "mlp"),
        "temb0.kernel": ("embed", "mlp"),
        "temb0.bias": ("mlp",),
        "temb1.kernel": ("mlp", "embed"),
        "**.temb.kernel": ("embed", "mlp"),
        "**.temb.bias": ("mlp",),
        "**GroupNorm_1.*": ("mlp",),
        "middle.proj_out.kernel": ("mlp", "embed"),
        "middle.*.kernel": ("embed", "mlp"),
        "**shortcut.kernel": ("embed", "mlp"),
        "**": ("embed",),
    }
    rules = {"height": (), "width": (), "channels": ()}
    return Zoo("unet", wide(init), loss, {"image": images(SIZE)["image"]}, draws=True, dims=dims, rules=rules)
