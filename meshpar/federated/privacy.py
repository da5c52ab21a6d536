"""Differential privacy for clients: clips updates, adds Gaussian noise, and computes epsilon."""

from __future__ import annotations

import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import pydantic

from meshpar.config import Config
from meshpar.errors import ConfigError

Positive = Annotated[float, pydantic.Field(gt=0)]


class Privacy(Config):
    """Clips the update of each client, and adds Gaussian noise to their mean.

    The mean is the sum over the clients that sent something, divided by `clients_per_round`, so that one client changes
    it by a bounded amount. Source: McMahan et al. 2018, arXiv:1710.06963.
    """

    clip_norm: Positive
    """Largest norm of the update of a client."""
    noise_multiplier: Annotated[float, pydantic.Field(ge=0)]
    """Standard deviation of the noise of the sum, as a multiple of `clip_norm`."""
    delta: Annotated[float, pydantic.Field(gt=0, lt=1)] = 1e-5
    """The delta for which epsilon is reported; it should be below 1 over the number of clients."""

    def clip(self, update: Any) -> tuple[Any, jax.Array]:
        """The update, scaled to a norm of at most `clip_norm`; and whether its norm was larger."""
        norm = jnp.sqrt(sum(jnp.square(x).sum() for x in jax.tree.leaves(update)))
        factor = jnp.minimum(1, self.clip_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
        return jax.tree.map(lambda x: x * factor, update), norm > self.clip_norm

    def add_noise(self, mean: Any, num_clients: int, key: jax.Array) -> Any:
        """The mean of `num_clients` updates, with noise."""
        leaves, structure = jax.tree.flatten(mean)
        scale = self.noise_multiplier * self.clip_norm / num_clients
        keys = jax.random.split(key, len(leaves))
        noisy = [x + scale * jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(structure, noisy)

    def epsilon(self, num_clients: int, per_round: int, num_rounds: int) -> float:
        """Epsilon for `delta` after some rounds. Neighbouring data sets differ in the data of one client.

        Rounds sample clients without replacement. Replacing a client changes the sum by up to `2 clip_norm`, so the
        accountant gets half of `noise_multiplier`. Source of the Rényi accountant: Wang et al. 2019, arXiv:1808.00087.

        Raises:
          ConfigError: dp-accounting is not installed.
        """
        if self.noise_multiplier == 0:
            return math.inf
        try:
            import dp_accounting  # pyright: ignore[reportMissingImports]
            from dp_accounting.rdp import RdpAccountant  # pyright: ignore[reportMissingImports]
        except ImportError:
            fix = "pip install 'meshpar[privacy]'"
            raise ConfigError(f"privacy: dp-accounting, which computes epsilon, is not installed; {fix}") from None
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
        gaussian = dp_accounting.GaussianDpEvent(self.noise_multiplier / 2)
        sampled = dp_accounting.SampledWithoutReplacementDpEvent(num_clients, per_round, gaussian)
        accountant = RdpAccountant(neighboring_relation=relation)
        return float(accountant.compose(sampled, num_rounds).get_epsilon(self.delta))
