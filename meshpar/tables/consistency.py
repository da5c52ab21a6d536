"""When the gradients of a device reach the table: at once, some steps late, or at a time that a seed determines.

A push that is d steps late is applied at the end of step t + d, if it was computed in step t. Gradients that arrive in
the same step are summed.

Shapes: n devices, C slots of each, D columns, Q = bound + 1 pushes that may be on their way.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import pydantic

from meshpar.config import Config, Count, Positive, Seed


class Pending(NamedTuple):
    """The last pushes, some of which have not arrived yet.

    Args:
      rows: int32 [Q, n, C].
      grads: [Q, n, C, D].
      due: int32 [Q, n], the step in which each arrives; -1 for none.
    """

    rows: jax.Array
    grads: jax.Array
    due: jax.Array


class Consistency(Config):
    """When the push of a step arrives. The default methods let it arrive at once."""

    shorthand: ClassVar = "kind"

    @property
    def bound(self) -> int:
        """The largest number of steps by which a push is late."""
        return 0

    def delays(self, step: jax.Array, num_devices: int) -> jax.Array:
        """int32 [n], by how many steps the push of each device in this step is late."""
        return jnp.full(num_devices, self.bound, jnp.int32)

    def arrive(
        self, pending: Pending | tuple[()], rows: jax.Array, grads: jax.Array, step: jax.Array, none: int
    ) -> tuple[jax.Array, jax.Array, Pending | tuple[()]]:
        """Returns the rows and gradients of all pushes that are due in a step, and the pending pushes after it.

        Args:
          rows: int32 [n, C], the rows that each device pushes in this step.
          grads: [n, C, D].
          none: the index that stands for no row.

        Returns:
          Rows int32 [M], gradients [M, D], and the pending pushes. M is n C if no push is late, otherwise Q n C.
        """
        if not isinstance(pending, Pending):
            return rows.reshape(-1), grads.reshape(-1, grads.shape[-1]), ()
        slot = step % (self.bound + 1)
        pending = Pending(
            pending.rows.at[slot].set(rows),
            pending.grads.at[slot].set(grads),
            pending.due.at[slot].set(step + self.delays(step, len(rows))),
        )
        arrived = jnp.where((pending.due == step)[..., None], pending.rows, none)
        return arrived.reshape(-1), pending.grads.reshape(-1, grads.shape[-1]), pending


class Sync(Consistency):
    """Each step reads the rows after all earlier pushes."""

    kind: Literal["sync"] = "sync"


class Stale(Consistency):
    """Each push arrives `steps` steps late, the largest delay that stale-synchronous training permits.

    Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server".
    """

    kind: Literal["stale"] = "stale"
    steps: Count = 1
    """By how many steps a push is late."""

    @property
    def bound(self) -> int:
        return self.steps


class Async(Consistency):
    """The push of each device in each step is late by 0 to `limit` steps, drawn from the seed.

    Source: Lian et al. 2015, arXiv:1506.08272 (asynchronous SGD with bounded delays).
    """

    kind: Literal["async"] = "async"
    limit: Positive = 1
    """The largest number of steps by which a push is late."""
    seed: Seed = 0
    """Determines the delay of each device in each step."""

    @property
    def bound(self) -> int:
        return self.limit

    def delays(self, step, num_devices):
        key = jax.random.fold_in(jax.random.key(self.seed), step)
        return jax.random.randint(key, (num_devices,), 0, self.limit + 1, jnp.int32)


AnyConsistency = Annotated[Sync | Stale | Async, pydantic.Field(discriminator="kind")]
