"""Runs the rounds of a federation, and evaluates its model for the server and for each client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.federated.cohort import Cohort, Draw
from meshpar.federated.config import Federated
from meshpar.federated.data import Examples
from meshpar.federated.model import Model
from meshpar.federated.round import AXES, ClientGroup, Results, Round, Server
from meshpar.mesh.layout import MeshLayout
from meshpar.sharding.resolve import AnyMesh
from meshpar.train.program import WHOLE, Program, compile_program, shardings, trace

Tree = Any


class Played(NamedTuple):
    """The result of a round.

    Args:
      number: of the round, counted from 1.
      cohort: its clients, with padding.
      server: the server after the round.
      results: by client, on the host, with padding.
    """

    number: int
    cohort: Cohort
    server: Server
    results: Results

    @property
    def loss(self) -> float:
        """The mean loss of the local steps, by the clients' weights; NaN if no client sent anything."""
        weight = self.cohort.weight
        return float((weight * self.results.loss).sum() / weight.sum()) if weight.sum() else float("nan")


@dataclass(frozen=True)
class Federation:
    """A federation on a mesh: programs, data and clients. `federation` makes one.

    Args:
      examples: of all clients.
      owned: the indices of each client's examples, int[...].
    """

    config: Federated
    mesh: AnyMesh
    model: Model
    examples: Examples
    owned: list[np.ndarray]

    @cached_property
    def round(self) -> Round:
        """The program of a round."""
        config = self.config
        return Round(
            mesh=self.mesh,
            model=self.model,
            method=config.method,
            lr=config.local.lr,
            per_round=config.clients_per_round,
            num_clients=len(self.owned),
            at_once=config.clients_at_once,
            privacy=config.privacy,
            secure=config.secure_sum,
        )

    @cached_property
    def draw(self) -> Draw:
        """Draws the clients of each round."""
        config = self.config
        return Draw(
            examples=self.examples,
            owned=self.owned,
            local=config.local,
            per_round=config.clients_per_round,
            weights=config.weighting,
            dropout=config.dropout,
            stragglers=config.stragglers,
            seed=config.seed,
            dtype=config.dtype,
        )

    def init(self) -> Server:
        """The first parameters, and the first state of the server."""
        return jax.device_put(jax.jit(self._first)(jax.random.key(self.config.seed)), self._whole)

    def play(self, server: Server, options: dict[str, Any] | None = None) -> Iterator[Played]:
        """Computes all rounds, one at each iteration. A round in which no client sends anything changes nothing.

        Args:
          server: the state before the first round, see `init`.
          options: of the compiler.

        Communication: that of `Round.program` in each round.
        """
        one = jax.device_get(self.config.method.init_client(server.params))
        states = jax.tree.map(lambda x: np.tile(x, (len(self.owned), *[1] * x.ndim)), one)
        key = jax.random.key(self.config.seed)
        program = self.compile(options)
        for number in range(1, self.config.num_rounds + 1):
            cohort = self.draw.cohort(number, self.round.num_padded)
            group = jax.device_put(_group(cohort, states), self._sharded)
            after, results = program(server, group, jax.device_put(jax.random.fold_in(key, number), self._whole))
            results = jax.device_get(results)
            server = after if cohort.sent.any() else server
            for state, new in zip(jax.tree.leaves(states), jax.tree.leaves(results.state), strict=True):
                state[cohort.clients[cohort.sent]] = new[cohort.sent]
            yield Played(number, cohort, server, results)

    def compile(self, options: dict[str, Any] | None = None) -> Program:
        """Compiles the program of a round."""
        key = jax.eval_shape(jax.random.key, 0)
        server = jax.eval_shape(self._first, key)
        one = jax.eval_shape(self.config.method.init_client, server.params)
        cohort = self.draw.cohort(1, self.round.num_padded)
        states = jax.tree.map(lambda x: np.empty((len(self.owned), *x.shape), x.dtype), one)
        server, key = _structs((server, key), self._whole)
        group = _structs(_group(cohort, states), self._sharded)
        results = jax.eval_shape(self.round.program, server, group, key)[1]
        out = shardings(server), jax.tree.map(lambda _: self._sharded, results)
        return compile_program(trace(self.round.program, (server, group, key), out), options)

    def evaluate(self, params: Tree, examples: Examples) -> tuple[np.ndarray, np.ndarray]:
        """The loss of each example [num], and whether its class is predicted correctly, bool [num]."""
        x = jnp.asarray(examples.x.astype(self.config.dtype))
        return jax.device_get(self._losses(params, x, jnp.asarray(examples.y)))

    @cached_property
    def _losses(self) -> Any:
        return jax.jit(self.model.losses)

    @property
    def _whole(self) -> NamedSharding:
        return NamedSharding(self.mesh, WHOLE)  # pyright: ignore

    @property
    def _sharded(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(AXES))  # pyright: ignore

    def _first(self, key: jax.Array) -> Server:
        params = self.model.init(key)
        return Server(params, self.config.method.init_server(params))


def _group(cohort: Cohort, states: Tree) -> ClientGroup:
    """The arrays of a cohort, with the states of its clients, selected from those of all clients."""
    place = np.arange(len(cohort.clients), dtype=np.int32)
    arrays: Any = place, cohort.x, cohort.y, cohort.order, cohort.weight
    return ClientGroup._make([*arrays, jax.tree.map(lambda x: x[cohort.clients], states)])


def _structs(tree: Tree, sharding: NamedSharding) -> Tree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def federation(config: Federated, mesh: AnyMesh | None = None) -> tuple[Federation, Examples]:
    """Makes the federation that a config describes. Returns it, and the held-out examples.

    Args:
      mesh: default: the config's mesh, over all devices.

    Raises:
      ConfigError: the data cannot be read or divided among the clients.

    >>> from meshpar import federated
    >>> clusters = {"kind": "clusters", "num_examples": 400, "held_out": 100}
    >>> config = federated.Federated(data=clusters, clients=20, local={"lr": 0.1}, num_rounds=1, run_dir="runs/clients")
    >>> trained, held_out = federated.federation(config)
    >>> len(trained.owned), len(held_out.y)
    (20, 100)
    """
    examples, held_out = config.data.read()
    num_classes = max(examples.num_classes, held_out.num_classes)
    model = config.model.build(examples.x.shape[1], num_classes, config.dtype)
    owned = config.clients.divide(examples.y)
    layout: MeshLayout = config.mesh
    return Federation(config, mesh or layout.build(), model, examples, owned), held_out
