"""Uses the experts' load after each step: updates the balance of the routers, and reports how even the load is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshpar.nn.experts.config import Experts
from meshpar.nn.experts.routing import LOAD
from meshpar.parallel.precision import wide

Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class RouterState:
    """The parameters of a router that no gradient changes: the load of the last step, or the bias of the selection.

    The optimizer does not update them. Each step sets them from the experts' load over all tokens that count.

    Args:
      layers: the key of the stacked blocks in the tree of parameters.
    """

    experts: Experts
    layers: str = "blocks"

    @property
    def name(self) -> str | None:
        """The name of the parameter; None if the router has none."""
        return self.experts.balance.carried if self.experts.balance else None

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of these parameters."""
        return (f"{self.layers}.mlp.router.{self.name}",) if self.name else ()

    def after_step(self, params: Any, metrics: Metrics, tokens: jax.Array) -> tuple[Any, Metrics]:
        """Returns the parameters for the next step, and the metrics with a summary of the loads.

        Args:
          metrics: of the step; the loads are float[layers, experts].
          tokens: the number of tokens that counted.
        """
        load = metrics[LOAD]
        return self._moved(params, load, tokens), metrics | summary(load)

    def _moved(self, params: Any, load: Float[Array, "L E"], tokens: Int[Array, ""]) -> Any:
        if self.name is None:
            return params
        blocks = params[self.layers]
        router = blocks["mlp"]["router"]
        old = router[self.name]
        row = load
        if self.experts.balance and self.experts.balance.kind == "bias":
            bias = wide(old[: len(load)])
            row = bias + self.experts.balance.weight * self._direction(load, tokens).astype(bias.dtype)
        new = old.at[: len(load)].set(row.astype(old.dtype))  # the rows after it are padding
        mlp = blocks["mlp"] | {"router": router | {self.name: new}}
        return params | {self.layers: blocks | {"mlp": mlp}}

    def _direction(self, load: Float[Array, "L E"], tokens: Int[Array, ""]) -> Float[Array, "L E"]:
        """1 for experts with fewer choices than the mean, -1 for those with more, 0 for the others.

        Numerics: computed with whole numbers, so that the result does not depend on the order of sums.
        """
        choices = jnp.round(load * (tokens * self.experts.per_token).astype(load.dtype))
        return jnp.sign(choices.sum(-1, keepdims=True) - self.experts.num * choices)


def summary(load: Float[Array, "L E"]) -> Metrics:
    """How even the load is: the largest load as a multiple of the mean, and the entropy, which is 1 for an even load.

    Each is reported for the layer where it is worst.

    >>> {name: float(x) for name, x in summary(jnp.ones((2, 4)) / 4).items()}
    {'experts_max_load': 1.0, 'experts_entropy': 1.0}
    """
    num = load.shape[-1]
    entropy = -jax.scipy.special.xlogy(load, load).sum(-1) / jnp.log(jnp.asarray(max(2, num), load.dtype))
    return {"experts_max_load": num * load.max(), "experts_entropy": entropy.min()}
