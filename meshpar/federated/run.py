"""Runs federated learning from its config, and records the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshpar.config import load as load_config
from meshpar.federated.config import Federated
from meshpar.federated.federation import Federation, Played, federation
from meshpar.records.metrics import Recorder, recorder
from meshpar.tree import flatten_with_paths

PARAMS = "params.npz"
"""The file of the last parameters in a run directory."""


def load(path: Path | str, overrides: Any = ()) -> Federated:
    """Reads a config file, with `key=value` overrides.

    Raises:
      ConfigError: lists all problems of the config.
    """
    return load_config(Federated, path, overrides)


@dataclass
class ByClient:
    """Counts the rounds of each client.

    Args:
      num: the number of clients.
      rounds: how often each client took part.
      dropped: how often it took part, but sent nothing.
      slow: how often it took part, but was slow.
    """

    num: int
    rounds: np.ndarray = field(init=False)
    dropped: np.ndarray = field(init=False)
    slow: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.rounds, self.dropped, self.slow = np.zeros((3, self.num), int)

    def add(self, played: Played) -> None:
        """Counts a round."""
        cohort = played.cohort
        is_client = cohort.clients >= 0
        clients = cohort.clients[is_client]
        self.rounds[clients] += 1
        self.dropped[clients] += ~cohort.sent[is_client]
        self.slow[clients] += cohort.is_slow[is_client]

    def record(self, trained: Federation, params: Any) -> dict[str, Any]:
        """Lists with an entry for each client: the mean loss and the accuracy on its own examples, and the counts."""
        losses, is_right = trained.evaluate(params, trained.examples)
        return {
            "examples": [len(own) for own in trained.owned],
            "rounds": self.rounds.tolist(),
            "dropped": self.dropped.tolist(),
            "slow": self.slow.tolist(),
            "loss": [float(losses[own].mean()) for own in trained.owned],
            "accuracy": [float(is_right[own].mean()) for own in trained.owned],
        }


def fit(config: Federated, *, json: bool = False) -> Any:
    """Runs all rounds. Returns the last parameters, and writes them and the records to `run_dir`.

    Args:
      json: print records as lines of JSON.

    Raises:
      ConfigError: the data cannot be read or divided; or a package that the config needs is not installed.
    """
    _spent(config, config.num_rounds)  # raises before the first round if epsilon cannot be computed
    trained, held_out = federation(config)
    server = trained.init()
    by_client = ByClient(len(trained.owned))
    with recorder(config.run_dir, config.num_rounds, as_json=json, loggers=()) as to:
        to.begin(0, config.model_dump(mode="json"))
        for played in trained.play(server):
            server = played.server
            by_client.add(played)
            to.record("train", played.number, **_of_round(played, config.local.lr))
            if played.number % config.eval_every == 0 or played.number == config.num_rounds:
                losses, is_right = trained.evaluate(server.params, held_out)
                values = {"loss": float(losses.mean()), "accuracy": float(is_right.mean())}
                to.record("evaluation", played.number, **values, **_spent(config, played.number))
        of_clients = by_client.record(trained, server.params)
        to.record("clients", config.num_rounds, **of_clients)
        _summarize(to, config, of_clients)
    params = jax.device_get(server.params)
    np.savez(config.run_dir / PARAMS, **flatten_with_paths(params))
    return params


def _of_round(played: Played, lr: float) -> dict[str, Any]:
    cohort = played.cohort
    is_client = cohort.clients >= 0
    return {
        "loss": played.loss,
        "lr": lr,
        "clients": int(is_client.sum()),
        "dropped": int((is_client & ~cohort.sent).sum()),
        "slow": int(cohort.is_slow.sum()),
        "update_norm": float(played.results.norm[is_client].mean()),
        "clipped": int(played.results.clipped[is_client].sum()),
        "beyond_range": int(played.results.beyond[is_client].sum()),
    }


def _spent(config: Federated, num_rounds: int) -> dict[str, float]:
    """Epsilon so far, with privacy."""
    if not config.privacy:
        return {}
    per_round = config.clients_per_round
    return {"epsilon": config.privacy.epsilon(config.clients.num, per_round, num_rounds)}


def _summarize(to: Recorder, config: Federated, of_clients: dict[str, Any]) -> None:
    accuracy = np.array(of_clients["accuracy"])
    worst, median = np.quantile(accuracy, [0.1, 0.5])
    why = f"accuracy by client: median {median:.3f}, worst tenth {worst:.3f} at most"
    to.record("summary", config.num_rounds, why=why)
