"""A federation on a mesh: its rounds as the steps of a training, and the evaluation of its model."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.federated.cohort import Cohort, Draw
from meshpar.federated.config import AXES, Federated
from meshpar.federated.data import Examples
from meshpar.federated.model import Model
from meshpar.federated.round import ClientGroup, Results, Round, Server
from meshpar.federated.step import CLIENTS, ROUNDS, RoundStep
from meshpar.mesh.layout import MeshLayout
from meshpar.sharding.resolve import AnyMesh
from meshpar.train.loop.feed import put
from meshpar.train.program import WHOLE, Program, compile_program, shardings, trace
from meshpar.train.state import TrainState

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
        return Round(self.config, self.mesh, self.model, len(self.owned))

    def cohort(self, number: int) -> Cohort:
        """The clients of a round, with padding."""
        return Draw(self.config, self.examples, self.owned).cohort(number, self.round.num_padded)

    def init(self) -> Server:
        """The first parameters, and the first state of the server."""
        return jax.device_put(jax.jit(self._first)(jax.random.key(self.config.seed)), self._whole)

    def first_state(self, server: Server) -> TrainState:
        """The state before the first round. What clients carry from round to round is on the host, see `RoundStep`."""
        one = jax.device_get(self.config.method.init_client(server.params))
        num = len(self.owned)
        own = jax.tree.map(lambda x: np.tile(x, (num, *[1] * x.ndim)), one)
        counts = {name: np.zeros(num, np.int32) for name in ("rounds", "dropped", "slow")}
        zero = np.zeros((), np.int32)
        return TrainState(zero, server.params, server.state, zero, {CLIENTS: own, ROUNDS: counts})

    def play(self, server: Server, options: dict[str, Any] | None = None) -> Iterator[Played]:
        """Computes all rounds, one at each iteration. A round in which no client sends anything changes nothing.

        Args:
          server: the state before the first round, see `init`.
          options: of the compiler.

        Communication: that of `Round.program` in each round.
        """
        step, state = self.compile_step(options), self.first_state(server)
        everyone = np.arange(self.round.num_padded)
        for number in range(1, self.config.num_rounds + 1):
            cohort = self.cohort(number)
            state, results = step.play(state, put(cohort._asdict(), step.batch, everyone))
            yield Played(number, cohort, Server(state.params, state.opt_state), results)

    def batches(self, start: int = 0, rows: Any = None) -> Generator[dict[str, np.ndarray], None, None]:
        """The cohorts from the round `start + 1` on, as batches of a training whose rows are clients."""
        for number in range(start + 1, self.config.num_rounds + 1):
            yield self.cohort(number)._asdict()

    def compile(self, options: dict[str, Any] | None = None) -> Program:
        """Compiles the program of a round."""
        key = jax.eval_shape(jax.random.key, 0)
        server = jax.eval_shape(self._first, key)
        one = jax.eval_shape(self.config.method.init_client, server.params)
        num = self.round.num_padded
        states = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num, *x.shape), x.dtype), one)
        server, key = _structs((server, key), self._whole)
        states = _structs(states, self._sharded)
        group = ClientGroup.of(self.batch, states)
        results = jax.eval_shape(self.round.program, server, group, key)[1]
        out = shardings(server), jax.tree.map(lambda _: self._sharded, results)
        return compile_program(trace(self.round.program, (server, group, key), out), options)

    @cached_property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a cohort, as structs with shardings."""
        return _structs(self.cohort(1)._asdict(), self._sharded)

    def compile_step(self, options: dict[str, Any] | None = None) -> RoundStep:
        """Compiles a round as the step of a training."""
        config = self.config
        return RoundStep(self.compile(options), self.batch, lr=config.local.lr, seed=config.seed)

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
