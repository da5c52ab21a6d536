"""Which film a person clicks: two towers above tables of people and films, in Flax Linen. The data of its tutorial."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

PEOPLE, FILMS = 400, 200


def rows(num: int = 16384, seed: int = 0) -> dict[str, np.ndarray]:
    """Films that were shown to people: some films more often than others. Clicks follow from the tastes of both."""
    fixed, draw = np.random.default_rng(7), np.random.default_rng(seed)
    tastes, kinds = fixed.normal(size=(PEOPLE, 4)), fixed.normal(size=(FILMS, 4))
    person, film = draw.integers(PEOPLE, size=num), (FILMS * draw.random(num) ** 3).astype(int)
    likes = (tastes[person] * kinds[film]).sum(1)
    return {"person": person, "film": film, "clicked": (draw.random(num) < 1 / (1 + np.exp(-2 * likes))).astype(int)}


class Tower(nn.Module):
    """A row of the table for each number, and a layer above it."""

    num: int
    width: int = 16

    @nn.compact
    def __call__(self, number):
        entries = nn.with_partitioning(nn.initializers.normal(0.3), ("vocab", "embed"))
        kernel = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        row = jnp.take(self.param("table", entries, (self.num, self.width)), number, axis=0)
        return nn.Dense(self.width, kernel_init=kernel)(row)


class Towers(nn.Module):
    @nn.compact
    def __call__(self, person, film):
        score = (Tower(PEOPLE, name="person")(person) * Tower(FILMS, name="film")(film)).sum(-1)
        return jnp.stack([jnp.zeros_like(score), score], axis=-1)
