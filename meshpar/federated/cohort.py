"""The clients of a round: which take part, drop out or are slow, and the order of their examples.

NumPy draws everything from (seed, round) or (seed, round, client), so no client's draw depends on another client.

Shapes: K clients of a round, with padding; S examples of the largest client; T steps of a client at most; B examples of
a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import numpy as np
import pydantic

from meshpar.config import Config, Positive
from meshpar.federated.data import Examples

Probability = Annotated[float, pydantic.Field(ge=0, le=1)]


class Local(Config):
    """The local training of a client: SGD."""

    lr: Annotated[float, pydantic.Field(gt=0)]
    """The learning rate."""
    epochs: Positive = 1
    """Passes over the client's examples in a round."""
    batch_size: Positive = 10
    """Examples per step; the last step of an epoch may have fewer."""

    def num_steps(self, num_examples: int) -> int:
        return self.epochs * math.ceil(num_examples / self.batch_size)


class Stragglers(Config):
    """Clients that are too slow to complete their local training."""

    rate: Probability
    """The probability that a client is slow in a round."""
    work: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.5
    """The fraction of its steps that a slow client makes; their number is rounded down."""
    late: Literal["use", "drop"] = "use"
    """Whether the server uses the update of a slow client, or drops it."""


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
      local: their local training.
      per_round: how many clients a round samples.
      weights: `examples`, by their number; `uniform`, equal for clients that sent something; `fixed`, 1 / per_round.
      dropout: the probability that a client sends nothing.
      stragglers: None if no client is slow.
      dtype: of examples and weights.
    """

    examples: Examples
    owned: Sequence[np.ndarray]
    local: Local
    per_round: int
    weights: Literal["examples", "uniform", "fixed"]
    dropout: float
    stragglers: Stragglers | None
    seed: int
    dtype: str

    @property
    def largest(self) -> int:
        """Examples of the largest client."""
        return max(map(len, self.owned))

    def cohort(self, round_: int, num: int) -> Cohort:
        """The cohort of a round, padded to `num` clients."""
        rng = np.random.default_rng([self.seed, round_])
        chosen = rng.choice(len(self.owned), self.per_round, replace=False)
        clients = np.concatenate([chosen, np.full(num - self.per_round, -1)]).astype(np.int32)
        largest = self.largest
        x = np.zeros((num, largest, *self.examples.x.shape[1:]), self.dtype)
        y = np.zeros((num, largest), np.int32)
        order = np.full((num, self.local.num_steps(largest), self.local.batch_size), -1, np.int32)
        size = np.zeros(num)
        is_slow = np.zeros(num, bool)
        for place, client in enumerate(chosen):
            own = self.owned[client]
            x[place, : len(own)] = self.examples.x[own]
            y[place, : len(own)] = self.examples.y[own]
            rng = np.random.default_rng([self.seed, round_, client])
            luck, pace = rng.random(2)
            steps = self._steps(len(own), rng)
            order[place, : len(steps)] = steps
            is_dropped = luck < self.dropout
            if self.stragglers and pace < self.stragglers.rate:
                is_slow[place] = True
                order[place, int(self.stragglers.work * len(steps)) :] = -1
                is_dropped |= self.stragglers.late == "drop"
            size[place] = 0 if is_dropped else len(own)
        place = np.arange(num, dtype=np.int32)
        return Cohort(clients, place, x, y, order, self._weight(size).astype(self.dtype), is_slow)

    def _steps(self, num_examples: int, rng: np.random.Generator) -> np.ndarray:
        """int [steps, B], the examples of each step of a client; -1 for none."""
        per_epoch = math.ceil(num_examples / self.local.batch_size) * self.local.batch_size
        epochs = np.full((self.local.epochs, per_epoch), -1)
        for epoch in epochs:
            epoch[:num_examples] = rng.permutation(num_examples)
        return epochs.reshape(-1, self.local.batch_size)

    def _weight(self, size: np.ndarray) -> np.ndarray:
        """The weights of clients from the number of their examples; 0 for those that sent nothing."""
        if self.weights == "fixed":
            return (size > 0) / self.per_round
        counted = size if self.weights == "examples" else (size > 0).astype(float)
        return counted / max(counted.sum(), 1)
