"""The next value of a series by a diagonal state-space model in Flax Linen, in a parallel scan (arXiv:2208.04933)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

LENGTH = 48


def rows(num: int = 2048, seed: int = 0) -> dict[str, np.ndarray]:
    """Sums of two oscillations with periods of their own, and 5 % of noise; the next value of each is the label."""
    draw = np.random.default_rng(seed)
    time = np.arange(LENGTH + 1)
    period, phase = draw.uniform(6, 30, (num, 2, 1)), draw.uniform(0, 2 * np.pi, (num, 2, 1))
    series = np.sin(2 * np.pi * time / period + phase).sum(1) + draw.normal(0, 0.05, (num, LENGTH + 1))
    return {"series": series[:, :-1].astype(np.float32), "next": series[:, 1:].astype(np.float32)}


def named(*dims):
    return nn.with_partitioning(nn.initializers.lecun_normal(), dims)


class StateSpace(nn.Module):
    """h[t] = a h[t-1] + (1 - a) u[t] for each channel, where a is a complex number inside of the unit circle."""

    @nn.compact
    def __call__(self, u):
        width = u.shape[-1]
        slow = self.param("slow", lambda key, shape: jnp.linspace(-3.0, 3.0, shape[0]), (width,))
        turn = self.param("turn", lambda key, shape: jnp.linspace(0.05, 1.5, shape[0]), (width,))
        size = jax.nn.sigmoid(slow)
        real, imaginary = size * jnp.cos(turn), size * jnp.sin(turn)

        def joined(first, second):
            (a, b, x, y), (c, d, z, w) = first, second
            return a * c - b * d, a * d + b * c, c * x - d * y + z, c * y + d * x + w

        x = (1 - size) * u
        moves = [jnp.broadcast_to(part, (1, *x.shape[1:])) for part in (real, imaginary)]  # the same for all rows
        _, _, x, y = jax.lax.associative_scan(joined, (*moves, x, jnp.zeros_like(x)), axis=1)
        return x, y


class Forecast(nn.Module):
    width: int = 32
    layers: int = 2

    @nn.compact
    def __call__(self, series):
        x = nn.Dense(self.width, kernel_init=named(None, "embed"))(series[..., None])
        for _ in range(self.layers):
            real, imaginary = StateSpace()(nn.LayerNorm()(x))
            y = nn.Dense(2 * self.width, kernel_init=named("embed", "mlp"))(jnp.concatenate([real, imaginary, x], -1))
            x = x + nn.Dense(self.width, kernel_init=named("mlp", "embed"))(nn.gelu(y))
        return nn.Dense(1, kernel_init=named("embed", None))(nn.LayerNorm()(x))[..., 0]
