"""Trains a Flax model, or a `Training`, in one call, which logs, evaluates, saves and resumes as a run does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import jax

from meshpar.checkpoint.agree import check_same
from meshpar.checkpoint.checkpoints import CheckpointMetadata, Checkpoints
from meshpar.checkpoint.checkpoints import checkpoints as checkpoints_of
from meshpar.checkpoint.lock import hold
from meshpar.checkpoint.mirror import mirrored
from meshpar.checkpoint.retention import Retention
from meshpar.checkpoint.saved import FOLDER, Checkpoint
from meshpar.errors import ConfigError, Problems
from meshpar.experiment.arrays import Data, Rows, batches, held_out_batches
from meshpar.interop.training import training
from meshpar.mesh.cursor import of_process as cursor_of
from meshpar.mesh.join import check_joined
from meshpar.progress import say
from meshpar.records.loggers import Logger
from meshpar.records.metrics import Recorder, recorder
from meshpar.regular_files import remote
from meshpar.tables.in_loop import TablesInLoop
from meshpar.tables.training import TableTraining
from meshpar.train import announce
from meshpar.train.begin import Beginning, Trainable, saved_structs
from meshpar.train.loop.events import events_of
from meshpar.train.loop.loop import Loop, Shown, Steps, result
from meshpar.train.loop.signals import Signals
from meshpar.train.loop.stopping import EarlyStopping
from meshpar.train.state import TrainState
from meshpar.train.step import Step
from meshpar.train.training import Training

TRAININGS = (Training, TableTraining)
"""What `fit` trains as it is; of anything else, a Flax model, it makes a `Training`."""


def fit_model(
    subject: Any,
    loss: Callable[..., Any] | None = None,
    data: Data | None = None,
    *,
    num_steps: int,
    run_dir: Path | str,
    tx: Any = None,
    batch_size: int | None = None,
    held_out: Rows | None = None,
    log_every: int = 10,
    eval_every: int | None = None,
    checkpoints: Retention | int | dict[str, Any] | None = None,
    early_stopping: EarlyStopping | dict[str, Any] | None = None,
    max_skipped_steps: int | None = 10,
    check_replicas_every: int | None = 100,
    loggers: Sequence[Logger] = (),
    callbacks: Sequence[Any] = (),
    json: bool = False,
    signals: bool = False,
    steps: bool = False,
    seed: int = 0,
    **options: Any,
) -> TrainState | Steps:
    """See `meshpar.fit`."""
    check_joined()
    run_dir, retention = _checked(subject, loss, tx, data, run_dir, held_out, eval_every, early_stopping, checkpoints)
    events_of(callbacks, evaluates=held_out is not None)
    assert data is not None, "checked above"
    reads = batches(data, batch_size, seed)
    example = reads[0]
    if isinstance(subject, TRAININGS):
        if options:
            what = f"the {type(subject).__name__} that is fitted has these already; pass them to training"
            raise ConfigError(f"{', '.join(options)}: {what}")
        made: Trainable = TablesInLoop(subject, seed) if isinstance(subject, TableTraining) else subject
    else:
        assert loss is not None, "checked above"
        made = training(subject, loss, tx, example, num_steps=num_steps, seed=seed, **options)
    size = next(iter(example.values())).shape[0]
    evaluated = held_out_batches(held_out, size)
    config = {"num_steps": num_steps, "batch_size": size, "seed": seed}
    check_same({"config": config})
    about = CheckpointMetadata(config, made.dims, seed, size)
    settings = {
        "early_stopping": None if early_stopping is None else EarlyStopping.model_validate(early_stopping),
        "callbacks": callbacks,
        "max_skipped_steps": max_skipped_steps,
        "check_replicas_every": check_replicas_every,
        "cursor": cursor_of(run_dir),
    }

    def trained() -> Shown:
        received = Signals()
        with (
            received.listening() if signals else nullcontext(),
            hold(run_dir),
            mirrored(retention.mirror, run_dir) as mirror,
            recorder(run_dir, num_steps, json, loggers) as records,
            checkpoints_of(run_dir / FOLDER, retention, about, mirror.push) as saved,
        ):
            step, state = _begun(made, saved, records, config, run_dir)
            loop = Loop(
                step=step, evaluate=made.lazy_evaluation(), train=reads, held_out=evaluated, recorder=records,
                checkpoints=saved, config=config, num_steps=num_steps, log_every=log_every, eval_every=eval_every,
                signals=received, rows=size, **settings,
            )  # fmt: skip
            first = int(state.step)
            state = yield from loop.steps(state, steps)
        if int(state.step) == first and jax.process_index() == 0:
            say(announce.nothing(run_dir, first, {}))
        return state

    return Steps(trained) if steps else result(trained())


def _begun(
    made: Trainable, saved: Checkpoints, records: Recorder, config: dict[str, Any], run_dir: Path
) -> tuple[Step, TrainState]:
    """The compiled step, and the state of the last checkpoint or the first one."""
    source = saved.newest(partial(saved_structs, made))
    _check_same_data(source, config, run_dir)
    beginning = Beginning(made, source, config=config) if source else None
    step = made.compile_step()
    if beginning is None:
        return step, made.compile_init()()
    state = beginning.state()
    records.record("restored", int(state.step), **beginning.record())
    return step, state


def _check_same_data(source: Checkpoint | None, config: dict[str, Any], run_dir: Path) -> None:
    """Refuses to resume where rows would be read twice, or not at all."""
    before = source.meta["config"] if source else {}
    problems = Problems()
    for name in ("batch_size", "seed"):
        if name in before and before[name] != config[name]:
            what = f"was {before[name]} in {run_dir}, and is {config[name]}: rows would be read twice, or not at all"
            problems.add(name, what, f"{name}={before[name]}, or another run_dir")
    problems.raise_any(ConfigError, "the run cannot be resumed:")


def _checked(
    subject: Any, loss: Any, tx: Any, data: Any, run_dir: Any, held_out: Any, eval_every: Any, early_stopping: Any,
    retention: Any,
) -> tuple[Path, Retention]:  # fmt: skip
    problems = Problems()
    is_training = isinstance(subject, TRAININGS)
    for name, value in {"loss": loss, "tx": tx}.items():
        if is_training == (value is not None):
            what = f"the {type(subject).__name__} that is fitted has one" if is_training else "it is missing"
            problems.add(name, what, f"no {name}" if is_training else f"pass {name}=")
    if data is None:
        problems.add("data", "it is missing", "pass data=, a dict of arrays, or a function: step -> batch")
    if address := remote(run_dir):
        problems.add("run_dir", *address)
    for name, value in {"eval_every": eval_every, "early_stopping": early_stopping}.items():
        if value and held_out is None:
            problems.add(name, "there are no rows to evaluate", "pass held_out=, a dict of arrays")
    if early_stopping and not eval_every:
        problems.add("early_stopping", "it needs evaluations", "set eval_every, the steps between them")
    problems.raise_any(ConfigError, "these arguments of fit are wrong:")
    return Path(run_dir), Retention() if retention is None else Retention.model_validate(retention)
