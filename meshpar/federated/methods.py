"""Methods of federated learning: what a client adds to its gradients, and how the server uses the mean of the updates.

An update of a client is the difference of its parameters after and before its local steps.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pydantic

from meshpar.config import Config
from meshpar.train.outer import outer_step

Positive = Annotated[float, pydantic.Field(gt=0)]
Beta = Annotated[float, pydantic.Field(ge=0, lt=1)]
Tree = Any


class LocalSteps(NamedTuple):
    """The local steps of a client in a round.

    Args:
      update: its parameters after the steps, minus its parameters before them.
      num_steps: int32[].
      lr: the learning rate of the steps.
    """

    update: Tree
    num_steps: jax.Array
    lr: float


class Method(Config):
    """A method of federated learning. The defaults are those of FedAvg."""

    shorthand: ClassVar = "kind"
    has_client_state: ClassVar[bool] = False
    """Whether clients keep a state from one of their rounds to the next."""
    server_lr: Positive = 1.0
    """Learning rate of the server."""

    @property
    def outer(self) -> optax.GradientTransformation:
        """The optimizer of the server, whose gradient is minus the mean of the clients' updates."""
        return optax.scale(-self.server_lr)

    def init_server(self, params: Tree) -> Tree:
        """The first state of the server."""
        return self.outer.init(params)

    def init_client(self, params: Tree) -> Tree:
        """The first state of a client."""
        return ()

    def gradient(self, grads: Tree, params: Tree, start: Tree, server: Tree, client: Tree) -> Tree:
        """The direction of a local step.

        Args:
          grads: of the loss of a batch.
          params: the client's parameters before the step.
          start: the server's parameters at the start of the round.
        """
        return grads

    def next_client(self, client: Tree, server: Tree, steps: LocalSteps) -> Tree:
        """The state of a client after its steps."""
        return client

    def update(self, params: Tree, server: Tree, mean: Tree, changes: Tree) -> tuple[Tree, Tree]:
        """The parameters and the state of the server after a round.

        Args:
          mean: the mean of the clients' updates.
          changes: the sum of the changes of the clients' states, divided by the number of all clients.
        """
        return outer_step(self.outer, jax.tree.map(jnp.negative, mean), server, params)


class FedAvg(Method):
    """Clients train by local SGD, and the server averages their parameters.

    Source: McMahan et al. 2017, arXiv:1602.05629.
    """

    kind: Literal["fedavg"] = "fedavg"


class FedProx(Method):
    """FedAvg, with `mu/2 |params - start|^2` as a part of each client's loss.

    Source: Li et al. 2020, arXiv:1812.06127.
    """

    kind: Literal["fedprox"] = "fedprox"
    mu: Positive = 0.1
    """Weight of the distance from the server's parameters."""

    def gradient(self, grads, params, start, server, client):
        return jax.tree.map(lambda g, x, x0: g + self.mu * (x - x0), grads, params, start)


class FedAdam(Method):
    """FedAvg, where the server takes a step of Adam with the mean update as its gradient.

    Source: Reddi et al. 2021, arXiv:2003.00295, Algorithm 2: without bias correction, and with v = tau^2 at first.
    """

    kind: Literal["fedadam"] = "fedadam"
    server_lr: Positive = 0.01
    b1: Beta = 0.9
    """Decay of the mean of the updates."""
    b2: Beta = 0.99
    """Decay of the mean of the squared updates."""
    tau: Positive = 1e-3
    """Added to the root of the mean squared update."""

    @property
    def outer(self):
        def init(params: Tree) -> Tree:
            mean = jax.tree.map(jnp.zeros_like, params)
            return {"mean": mean, "square": jax.tree.map(lambda x: jnp.full_like(x, self.tau**2), params)}

        def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
            means = jax.tree.map(lambda m, g: self.b1 * m + (1 - self.b1) * g, state["mean"], updates)
            squares = jax.tree.map(lambda v, g: self.b2 * v + (1 - self.b2) * g**2, state["square"], updates)
            steps = jax.tree.map(lambda m, v: -(self.server_lr * m) / (jnp.sqrt(v) + self.tau), means, squares)
            return steps, {"mean": means, "square": squares}

        return optax.GradientTransformation(init, update)


class Scaffold(Method):
    """Local SGD whose gradients are corrected by the difference of the server's and the client's control variates.

    After K steps from x to y, a client's control variate c_i becomes `c_i - c + (x - y) / (K lr)`, option II of the
    paper.

    Source: Karimireddy et al. 2020, arXiv:1910.06378. Memory: the parameters once more for each client, on the host.
    """

    kind: Literal["scaffold"] = "scaffold"
    has_client_state: ClassVar = True

    def init_server(self, params):
        return jax.tree.map(jnp.zeros_like, params)

    def init_client(self, params):
        return jax.tree.map(jnp.zeros_like, params)

    def gradient(self, grads, params, start, server, client):
        return jax.tree.map(lambda g, c, own: g + c - own, grads, server, client)

    def next_client(self, client, server, steps):
        def moved(own: jax.Array, c: jax.Array, update: jax.Array) -> jax.Array:
            num = jnp.maximum(steps.num_steps, 1).astype(update.dtype)
            return jnp.where(steps.num_steps > 0, own - c - update / (num * steps.lr), own)

        return jax.tree.map(moved, client, server, steps.update)

    def update(self, params, server, mean, changes):
        new, _ = super().update(params, server, mean, changes)
        return new, jax.tree.map(jnp.add, server, changes)


AnyMethod = Annotated[FedAvg | FedProx | FedAdam | Scaffold, pydantic.Field(discriminator="kind")]
