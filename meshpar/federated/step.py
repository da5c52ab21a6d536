"""A round as the step of a training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from meshpar.federated.round import ClientGroup, Results, Server
from meshpar.parallel.batch import Batch
from meshpar.train.program import whole
from meshpar.train.state import TrainState
from meshpar.train.step import Metrics, Step

CLIENTS = "clients"
"""The key in `TrainState.carried` of what the method carries for each client."""
ROUNDS = "rounds"
"""The key in `TrainState.carried` of counts by client: in how many rounds it took part, sent nothing, was slow."""


@dataclass(frozen=True, kw_only=True)
class RoundStep(Step):
    """The compiled round of a federation, on a batch whose rows are clients: a `Cohort` as a dict.

    The state's `params` and `opt_state` are those of the server. Its `carried` has arrays [all clients, ...] on the
    host, of which a round changes the rows of its cohort. A round in which no client sends anything is skipped.

    Args:
      lr: of the clients.
      seed: from which each round has its key.
    """

    lr: float
    seed: int

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        state, results = self.play(state, batch)
        clients, weight, is_slow = jax.device_get((batch["clients"], batch["weight"], batch["is_slow"]))
        is_client = clients >= 0
        total = weight.sum()
        metrics = {
            "loss": (weight * results.loss).sum() / total if total else np.nan,
            "lr": self.lr,
            "clients": is_client.sum(),
            "dropped": (is_client & (weight == 0)).sum(),
            "slow": is_slow.sum(),
            "update_norm": results.norm[is_client].mean(),
            "clipped": results.clipped[is_client].sum(),
            "beyond_range": results.beyond[is_client].sum(),
            "tokens": is_client.sum(),
            "skipped": state.skipped,
        }
        return state, {name: np.asarray(value) for name, value in metrics.items()}  # pyright: ignore

    def play(self, state: TrainState, batch: Batch) -> tuple[TrainState, Results]:
        """The state after a round, and its results by client, on the host, with padding."""
        clients, weight, is_slow = jax.device_get((batch["clients"], batch["weight"], batch["is_slow"]))
        index, skipped, carried = jax.device_get((state.step, state.skipped, state.carried))
        sharding: Any = batch["weight"].sharding
        own = jax.device_put(jax.tree.map(lambda x: x[clients], carried[CLIENTS]), sharding)
        group = ClientGroup.of(batch, own)
        with jax.transfer_guard_host_to_device("allow"):
            key = jax.device_put(jax.random.fold_in(jax.random.key(self.seed), index + 1), whole(sharding.mesh))
        before = Server(state.params, state.opt_state)
        after, results = self.program(before, group, key)
        results = jax.device_get(results)
        is_client, is_sent = clients >= 0, weight > 0
        if not is_sent.any():
            after = before
            skipped += 1

        def with_results(x: np.ndarray, new: np.ndarray) -> np.ndarray:
            x = x.copy()  # a checkpoint may still be written of the array
            x[clients[is_sent]] = new[is_sent]
            return x

        which = {"rounds": is_client, "dropped": is_client & ~is_sent, "slow": is_slow}
        counts = {name: x.copy() for name, x in carried[ROUNDS].items()}
        for name, x in counts.items():
            x[clients[which[name]]] += 1
        carried = {CLIENTS: jax.tree.map(with_results, carried[CLIENTS], results.state), ROUNDS: counts}
        return replace(
            state, step=np.asarray(index + 1), params=after.params, opt_state=after.state, skipped=np.asarray(skipped),
            carried=carried,
        ), results  # fmt: skip
