"""Runs federated learning from its config, and records the run."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshpar.checkpoint.checkpoints import CheckpointMetadata, Checkpoints, checkpoints
from meshpar.checkpoint.lock import hold
from meshpar.checkpoint.saved import FOLDER, Checkpoint
from meshpar.config import changed
from meshpar.config import load as load_config
from meshpar.errors import ConfigError, Problems
from meshpar.federated.config import Federated
from meshpar.federated.data import Examples
from meshpar.federated.federation import Federation, federation
from meshpar.federated.step import ROUNDS
from meshpar.records.metrics import Recorder, recorder
from meshpar.train.loop.loop import Loop
from meshpar.train.loop.signals import Signals
from meshpar.train.state import TrainState
from meshpar.tree import flatten_with_paths, map_with_path

PARAMS = "params.npz"
"""The file of the last parameters in a run directory."""
FREE = ("clients_at_once", "eval_every", "mesh", "num_rounds", "run_dir")
"""The keys that may change when a run is resumed."""


def load(path: Path | str, overrides: Any = ()) -> Federated:
    """Reads a config file, with `key=value` overrides.

    Raises:
      ConfigError: lists all problems of the config.
    """
    return load_config(Federated, path, overrides)


def fit(config: Federated, *, json: bool = False, signals: bool = False) -> Any:
    """Runs all rounds, or resumes from the last checkpoint in `run_dir`. Returns the last parameters.

    It writes them, the records and checkpoints to `run_dir`.

    Args:
      json: print records as lines of JSON.
      signals: at SIGINT or SIGTERM finish the round, save, and raise `Interrupted`.

    Raises:
      ConfigError: the data cannot be read or divided; a package that the config needs is not installed; or another
        config began the run.
      RunError: a file could not be written.
      Interrupted: a signal came.
    """
    _spent(config, config.num_rounds)  # raises before the first round if epsilon cannot be computed
    trained, held_out = federation(config)
    received = Signals()
    about = CheckpointMetadata(config.model_dump(mode="json"), seed=config.seed)
    with (
        received.listening() if signals else nullcontext(),
        hold(config.run_dir),
        recorder(config.run_dir, config.num_rounds, as_json=json, loggers=()) as records,
        checkpoints(config.run_dir / FOLDER, about=about) as saved,
    ):
        state = _begun(trained, saved)
        loop = Loop(
            step=trained.compile_step(),
            train=trained,
            held_out=None,
            recorder=records,
            checkpoints=saved,
            config=dict(about.config),
            num_steps=config.num_rounds,
            log_every=1,
            eval_every=config.eval_every,
            callbacks=[_OfServer(trained, held_out), _OfClients(trained, records)],
            signals=received,
            rows=config.clients_per_round,
        )
        params = jax.device_get(loop.fit(state).params)
    np.savez(config.run_dir / PARAMS, **flatten_with_paths(params))
    return params


def _begun(trained: Federation, saved: Checkpoints) -> TrainState:
    """The state of the last checkpoint, or the first one."""
    first = trained.first_state(trained.init())

    def structs(source: Checkpoint) -> TrainState:
        problems = Problems()
        for key, (before, now) in changed(source.meta["config"], saved.about.config).items():
            if key.partition(".")[0] not in FREE:
                what = f"was {before} in {trained.config.run_dir}, and is {now}"
                problems.add(key, what, f"{key}={before}, or another run_dir")
        problems.raise_any(ConfigError, "the run cannot be resumed:")
        return jax.tree.map(_struct, first)

    source = saved.newest(structs)
    if source is None:
        return first
    restored = source.restore(structs(source), exclude=["carried.**"])
    of_clients = map_with_path(lambda path, _: source.on_host(f"carried.{path}"), first.carried)
    return replace(restored, carried=of_clients)


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    """An array of the state, which may be one on the host."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))


@dataclass(frozen=True)
class _OfServer:
    """Evaluates the parameters of the server."""

    trained: Federation
    held_out: Examples

    def __call__(self, state: TrainState, step: int) -> dict[str, float]:
        losses, is_right = self.trained.evaluate(state.params, self.held_out)
        values = {"loss": float(losses.mean()), "accuracy": float(is_right.mean())}
        return values | _spent(self.trained.config, step)


@dataclass(frozen=True)
class _OfClients:
    """Records lists with an entry for each client, at the end: the last model on its own examples, and its rounds."""

    trained: Federation
    records: Recorder

    def on_train_end(self, state: TrainState, step: int) -> None:
        owned = self.trained.owned
        losses, is_right = self.trained.evaluate(state.params, self.trained.examples)
        accuracy = [float(is_right[own].mean()) for own in owned]
        counts = {name: x.tolist() for name, x in state.carried[ROUNDS].items()}
        values = {"loss": [float(losses[own].mean()) for own in owned], "accuracy": accuracy}
        worst, median = np.quantile(accuracy, [0.1, 0.5])
        why = f"accuracy by client: median {median:.3f}, worst tenth {worst:.3f} at most"
        self.records.record("clients", step, examples=[len(own) for own in owned], **counts, **values, why=why)


def _spent(config: Federated, num_rounds: int) -> dict[str, float]:
    """Epsilon so far, with privacy."""
    if not config.privacy:
        return {}
    per_round = config.clients_per_round
    return {"epsilon": config.privacy.epsilon(config.clients.num, per_round, num_rounds)}
