"""A round as one SPMD program: clients are a dim that is sharded over the mesh, and computed by scan and vmap.

Shapes: K clients of a round, with padding; S examples of the largest client; T steps of a client at most; B examples of
a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.federated.config import AXES, Federated
from meshpar.federated.methods import LocalSteps
from meshpar.federated.model import Model
from meshpar.federated.secure import mask
from meshpar.mesh.varying import varying
from meshpar.parallel.context import ParallelContext
from meshpar.sharding.resolve import AnyMesh
from meshpar.sharding.rules import AxisRules
from meshpar.train.program import WHOLE, on_shards

Tree = Any


class Server(NamedTuple):
    """The state of the server between rounds: the parameters, and the state of the method."""

    params: Tree
    state: Tree


class ClientGroup(NamedTuple):
    """The clients of a round, on the devices; see `cohort.Cohort`.

    Args:
      place: int32 [K], the index in the cohort.
      state: the clients' states, [K, ...].
    """

    place: jax.Array
    x: jax.Array
    y: jax.Array
    order: jax.Array
    weight: jax.Array
    state: Tree

    @classmethod
    def of(cls, cohort: Mapping[str, Any], state: Tree) -> Self:
        return cls(*(cohort[name] for name in cls._fields[:-1]), state)  # pyright: ignore


class Results(NamedTuple):
    """The results of each client.

    Args:
      loss: [K], the mean of the losses before each of its steps.
      norm: [K], of its update.
      clipped: bool [K], whether privacy clipped its update.
      beyond: int32 [K], elements of its update beyond the range of the secure sum.
      state: its next state, [K, ...].
    """

    loss: jax.Array
    norm: jax.Array
    clipped: jax.Array
    beyond: jax.Array
    state: Tree


class Sums(NamedTuple):
    """Sums over clients.

    Args:
      updates: the weighted updates; masked integers under a secure sum.
      unmask: the masks of clients that sent nothing; zeros without a secure sum.
      changes: the changes of the clients' states.
    """

    updates: Tree
    unmask: Tree
    changes: Tree


@dataclass(frozen=True)
class Round:
    """The program of a round.

    Args:
      num_clients: the number of all clients.
    """

    config: Federated
    mesh: AnyMesh
    model: Model
    num_clients: int

    @property
    def num_padded(self) -> int:
        """K: the clients of a round, padded to equal groups on all devices."""
        return self.mesh.size * self._num_groups * self._group_size

    @property
    def _num_groups(self) -> int:
        """Groups that a device computes one after another."""
        return math.ceil(math.ceil(self.config.clients_per_round / self.mesh.size) / self.config.clients_at_once)

    @property
    def _group_size(self) -> int:
        return math.ceil(self.config.clients_per_round / self.mesh.size / self._num_groups)

    @property
    def program(self) -> Callable[[Server, ClientGroup, jax.Array], tuple[Server, Results]]:
        """A function of global arrays: (server, clients, the round's key) -> the next server, and results by client.

        Communication: an all-reduce of the parameters; twice with SCAFFOLD, or under a secure sum.
        Memory: a device holds the parameters of `clients_at_once` clients.
        """
        ctx = ParallelContext(mesh=self.mesh, rules=AxisRules(preset="replicated"), manual=True)
        clients = PartitionSpec(AXES)
        return on_shards(self._local, ctx, (WHOLE, clients, WHOLE), (WHOLE, clients))

    def _local(self, server: Server, clients: ClientGroup, key: jax.Array) -> tuple[Server, Results]:
        of_masks, of_noise = jax.random.split(key)
        shape = self._num_groups, self._group_size
        groups = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), clients)
        own = jax.tree.map(lambda x: varying(x, AXES), server)

        def add(sums: Sums, group: ClientGroup) -> tuple[Sums, Results]:
            parts, results = jax.vmap(lambda client: self._client(own, client, of_masks))(group)
            return jax.tree.map(lambda total, x: total + x.sum(0, dtype=x.dtype), sums, parts), results

        first = jax.tree.map(lambda x: x[0, 0], groups)
        empty = jax.eval_shape(lambda: self._client(own, first, of_masks)[0])
        zeros = jax.tree.map(lambda x: varying(jnp.zeros(x.shape, x.dtype), AXES), empty)
        sums, results = lax.scan(add, zeros, groups)
        sums = jax.tree.map(lambda x: lax.psum(x, AXES), sums)
        results = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)
        return self._updated(server, sums, of_noise), results

    def _client(self, server: Server, client: ClientGroup, key: jax.Array) -> tuple[Sums, Results]:
        """The terms of one client in the sums, and its results. A client that sends nothing computes them too."""
        update, num_steps, loss = self._train(server, client)
        steps = LocalSteps(update, num_steps, self.config.local.lr)
        sent = client.weight > 0
        state = self.config.method.next_client(client.state, server.state, steps)
        state = jax.tree.map(lambda new, old: jnp.where(sent, new, old), state, client.state)
        changes = jax.tree.map(lambda new, old: (new - old) / self.num_clients, state, client.state)
        norm = jnp.sqrt(sum(jnp.square(x).sum() for x in jax.tree.leaves(update)))
        clipped = jnp.zeros_like(sent)
        beyond = jnp.zeros_like(num_steps)
        if self.config.privacy:
            update, clipped = self.config.privacy.clip(update)
        unmask = jax.tree.map(jnp.zeros_like, update)
        message = jax.tree.map(lambda x: client.weight * x, update)
        if self.config.secure_sum:
            code, beyond = self.config.secure_sum.encode(update, client.weight)
            own = mask(key, client.place, self.config.clients_per_round, update)
            is_dropped = ~sent & (client.place < self.config.clients_per_round)
            message = jax.tree.map(lambda x, m: jnp.where(sent, x + m, 0), code, own)
            unmask = jax.tree.map(lambda m: jnp.where(is_dropped, m, 0), own)
        return Sums(message, unmask, changes), Results(loss, norm, clipped, beyond, state)

    def _train(self, server: Server, client: ClientGroup) -> tuple[Tree, jax.Array, jax.Array]:
        """The update of a client, the number of its steps, and the mean of their losses."""

        def mean_loss(params: Tree, order: jax.Array) -> jax.Array:
            losses, _ = self.model.losses(params, client.x[order], client.y[order])
            is_example = order >= 0
            num = jnp.maximum(is_example.sum(dtype=losses.dtype), 1)
            return jnp.where(is_example, losses, 0).sum() / num

        def step(params: Tree, order: jax.Array) -> tuple[Tree, tuple[jax.Array, jax.Array]]:
            loss, grads = jax.value_and_grad(mean_loss)(params, order)
            direction = self.config.method.gradient(grads, params, server.params, server.state, client.state)
            is_step = (order >= 0).any()
            new = jax.tree.map(lambda x, d: jnp.where(is_step, x - self.config.local.lr * d, x), params, direction)
            return new, (jnp.where(is_step, loss, 0), is_step)

        params, (losses, is_step) = lax.scan(step, server.params, client.order)
        num = is_step.sum(dtype=jnp.int32)
        update = jax.tree.map(jnp.subtract, params, server.params)
        return update, num, losses.sum() / jnp.maximum(num, 1).astype(losses.dtype)

    def _updated(self, server: Server, sums: Sums, key: jax.Array) -> Server:
        mean = sums.updates
        if self.config.secure_sum:
            mean = self.config.secure_sum.decode(jax.tree.map(jnp.add, mean, sums.unmask), server.params)
        if self.config.privacy:
            mean = self.config.privacy.add_noise(mean, self.config.clients_per_round, key)
        return Server(*self.config.method.update(server.params, server.state, mean, sums.changes))
