"""Prices of houses from a table, by a small network in Flax Linen. The table is synthetic: its rule is known."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

DISTRICTS = 12


def rows(num: int = 4000, seed: int = 0) -> dict[str, np.ndarray]:
    """Area, rooms, age and district of houses, and the logarithm of their prices, with 5 % of noise."""
    draw = np.random.default_rng(seed)
    area, age = draw.uniform(40, 250, num), draw.uniform(0, 100, num)
    rooms = np.maximum(1, np.round(area / 30 + draw.normal(0, 1, num)))
    district = draw.integers(DISTRICTS, size=num)
    level = np.random.default_rng(5).normal(0, 0.4, DISTRICTS)[district]
    price = np.log(area) + 0.05 * rooms - 0.004 * age + level + draw.normal(0, 0.05, num)
    numbers = np.stack([(area - 145) / 60, (rooms - 5) / 2, (age - 50) / 30], axis=-1)
    return {"numbers": numbers.astype(np.float32), "district": district, "price": price.astype(np.float32)}


class Prices(nn.Module):
    width: int = 64

    @nn.compact
    def __call__(self, numbers, district):
        def dense(features, *dims):
            return nn.Dense(features, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), dims))

        known = jnp.concatenate([numbers, nn.Embed(DISTRICTS, 5)(district)], axis=-1)
        x = nn.gelu(dense(self.width, "embed", "mlp")(known))
        x = nn.gelu(dense(self.width, "mlp", "embed")(x))
        return nn.Dense(1, bias_init=nn.initializers.constant(5.0))(x)
