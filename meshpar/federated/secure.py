"""The arithmetic of a secure sum: integers modulo 2^32, with masks that cancel.

The clients of a round form a ring. Neighbours share a seed, from which both expand the same random integers. A client
adds the integers that it shares with the client before it, and subtracts those that it shares with the client after it.
A single message is uniformly random; the sum of all messages is the sum of the updates. If a client drops out, the
server learns its two seeds from the others, and adds its mask.

Only sums are computed here. The protocol's keys, secret shares and signatures are not simulated: this protects nothing.

Source: Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning"; a ring is the
sparsest of the graphs of Bell et al. 2020, "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead".
"""

from __future__ import annotations

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import pydantic
from jax import lax

from meshpar.config import Config

LARGEST = 1 << 30
"""The integer that stands for `range`. Sums up to twice `range` do not wrap."""


class SecureSum(Config):
    """Sums the updates of clients as masked integers, so that the server sees only their sum.

    Numerics: an element of the sum is off by at most `range / 2^31` for each client.
    """

    range: Annotated[float, pydantic.Field(gt=0)] = 8.0
    """Elements of an update with a larger magnitude are clipped, and counted."""

    def encode(self, update: Any, weight: jax.Array) -> tuple[Any, jax.Array]:
        """The weighted update as uint32, and how many of its elements were clipped.

        Args:
          weight: []; the weights of all clients sum to 1 at most.
        """
        clipped = jax.tree.map(lambda x: jnp.clip(x, -self.range, self.range), update)
        changed = jax.tree.map(lambda x, y: (x != y).sum(dtype=jnp.int32), update, clipped)
        scale = LARGEST / self.range
        code = jax.tree.map(
            lambda x: lax.bitcast_convert_type(jnp.round(weight * x * scale).astype(jnp.int32), jnp.uint32), clipped
        )
        return code, jnp.stack(jax.tree.leaves(changed)).sum(dtype=jnp.int32)

    def decode(self, total: Any, like: Any) -> Any:
        """The sum of the weighted updates, in the dtypes of `like`."""

        def decoded(code: jax.Array, x: jax.Array) -> jax.Array:
            return lax.bitcast_convert_type(code, jnp.int32).astype(x.dtype) * (self.range / LARGEST)

        return jax.tree.map(decoded, total, like)


def mask(key: jax.Array, place: jax.Array, num_clients: int, like: Any) -> Any:
    """The mask of a client. The masks of all places in the ring sum to 0 modulo 2^32.

    Args:
      key: of the round.
      place: int32[], of the client in the ring of `num_clients`.
    """
    before = _shared(jax.random.fold_in(key, place), like)
    after = _shared(jax.random.fold_in(key, (place + 1) % num_clients), like)
    return jax.tree.map(jnp.subtract, before, after)


def _shared(key: jax.Array, like: Any) -> Any:
    """The random integers that two neighbours share."""
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        structure, [jax.random.bits(k, x.shape, jnp.uint32) for k, x in zip(keys, leaves, strict=True)]
    )
