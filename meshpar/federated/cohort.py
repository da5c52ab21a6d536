"""The clients of a round: which take part, drop out or are slow, and the order of their examples.

NumPy draws everything from (seed, round) or (seed, round, client), so no client's draw depends on another client.

Shapes: K clients of a round, with padding; S examples of the largest client; T steps of a client at most; B examples of
a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshpar.federated.config import Federated
from meshpar.federated.data import Examples


class Cohort(NamedTuple):
    """The clients of a round, as arrays for the devices.

    Args:
      clients: int32 [K], the index of each client; -1 for padding.
      place: int32 [K], its index in the cohort.
      x: [K, S, ...], their examples.
      y: int32 [K, S].
      order: int32 [K, T, B], the examples of each step; -1 for none.
      weight: [K], the weights of the updates; 0 for padding, and for clients that sent nothing.
      is_slow: bool [K].
    """

    clients: np.ndarray
    place: np.ndarray
    x: np.ndarray
    y: np.ndarray
    order: np.ndarray
    weight: np.ndarray
    is_slow: np.ndarray

    @property
    def sent(self) -> np.ndarray:
        """bool [K], whether the server got the update of the client."""
        return self.weight > 0


@dataclass(frozen=True)
class Draw:
    """Draws the cohorts of a run.

    Args:
      examples: of all clients.
      owned: the examples of each client.
    """

    config: Federated
    examples: Examples
    owned: Sequence[np.ndarray]

    def cohort(self, round_: int, num: int) -> Cohort:
        """The cohort of a round, padded to `num` clients."""
        config, local = self.config, self.config.local
        rng = np.random.default_rng([config.seed, round_])
        chosen = rng.choice(len(self.owned), config.clients_per_round, replace=False)
        clients = np.concatenate([chosen, np.full(num - len(chosen), -1)]).astype(np.int32)
        largest = max(map(len, self.owned))
        x = np.zeros((num, largest, *self.examples.x.shape[1:]), config.dtype)
        y = np.zeros((num, largest), np.int32)
        order = np.full((num, local.num_steps(largest), local.batch_size), -1, np.int32)
        size = np.zeros(num)
        is_slow = np.zeros(num, bool)
        for place, client in enumerate(chosen):
            own = self.owned[client]
            x[place, : len(own)] = self.examples.x[own]
            y[place, : len(own)] = self.examples.y[own]
            rng = np.random.default_rng([config.seed, round_, client])
            luck, pace = rng.random(2)
            steps = self._steps(len(own), rng)
            order[place, : len(steps)] = steps
            is_dropped = luck < config.dropout
            if config.stragglers and pace < config.stragglers.rate:
                is_slow[place] = True
                order[place, int(config.stragglers.work * len(steps)) :] = -1
                is_dropped |= config.stragglers.late == "drop"
            size[place] = 0 if is_dropped else len(own)
        place = np.arange(num, dtype=np.int32)
        return Cohort(clients, place, x, y, order, self._weight(size).astype(config.dtype), is_slow)

    def _steps(self, num_examples: int, rng: np.random.Generator) -> np.ndarray:
        """int [steps, B], the examples of each step of a client; -1 for none."""
        local = self.config.local
        per_epoch = math.ceil(num_examples / local.batch_size) * local.batch_size
        epochs = np.full((local.epochs, per_epoch), -1)
        for epoch in epochs:
            epoch[:num_examples] = rng.permutation(num_examples)
        return epochs.reshape(-1, local.batch_size)

    def _weight(self, size: np.ndarray) -> np.ndarray:
        """The weights of clients from the number of their examples; 0 for those that sent nothing."""
        if self.config.weighting == "fixed":
            return (size > 0) / self.config.clients_per_round
        counted = size if self.config.weighting == "examples" else (size > 0).astype(float)
        return counted / max(counted.sum(), 1)
