"""Trains a run: its first or restored state, the compiled step, and the loop that writes to its directory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from meshpar.checkpoint.agree import check_same
from meshpar.checkpoint.checkpoints import CheckpointMetadata, Checkpoints, checkpoints
from meshpar.checkpoint.lock import hold
from meshpar.checkpoint.mirror import Mirror, mirrored
from meshpar.checkpoint.saved import FOLDER, find, steps
from meshpar.data import Ids
from meshpar.data.order import Order
from meshpar.data.rows.config import RowData
from meshpar.errors import ConfigError, ContractWarning, ProgramError
from meshpar.experiment.config import Run, as_run
from meshpar.experiment.held_out import check_short_batch, measure_of
from meshpar.experiment.mfu import mfu_of
from meshpar.experiment.prepare import Prepared, prepare
from meshpar.experiment.rollouts import of_prompts, rollouts_of
from meshpar.experiment.start import beginning_of, keep_files_of_source, newest_described, order_of
from meshpar.mesh.cursor import of_process as cursor_of
from meshpar.mesh.join import check_joined
from meshpar.models.decoder import DecoderModel
from meshpar.optim.ema import averaged
from meshpar.parallel.batch import TEACHER
from meshpar.progress import busy, say
from meshpar.records.file import FILE
from meshpar.records.metrics import Recorder, recorder
from meshpar.regular_files import remote
from meshpar.train import announce
from meshpar.train.begin import Beginning
from meshpar.train.copies.copies import Copies
from meshpar.train.evaluate import LazyEvaluation
from meshpar.train.loop.events import events_of
from meshpar.train.loop.loop import Loop, Shown, Steps, result
from meshpar.train.loop.signals import Signals
from meshpar.train.loss import Distill
from meshpar.train.state import TrainState
from meshpar.train.step import Step

FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NCCL_ALGO", "NCCL_PROTO")
"""Environment variables that may change the collectives of XLA or NCCL. All processes must have the same values."""


def fit_run(
    run: Run | Path | str,
    *,
    json: bool = False,
    profile: Path | str | None = None,
    dump_hlo: Path | str | None = None,
    callbacks: Sequence[Any] = (),
    signals: bool = False,
    steps: bool = False,
) -> TrainState | Steps:
    """See `meshpar.fit`."""
    check_joined()
    run = as_run(run)
    callbacks = (*(callback.load() for callback in run.callbacks), *callbacks)
    events_of(callbacks, evaluates=True)
    trained = partial(_trained, run, signals, json, _path(profile), _path(dump_hlo), callbacks, steps)
    return Steps(trained) if steps else result(trained())


def _path(path: Path | str | None) -> Path | None:
    if path is not None and (problem := remote(path)):
        raise ConfigError("; ".join(problem))
    return None if path is None else Path(path)


def _trained(run: Run, listens: bool, *how: Any) -> Shown:
    signals = Signals()
    with signals.listening() if listens else nullcontext():
        prepared = prepare(run)
        about = replace(prepared.about, files=run.data.fingerprint())
        _check_same(about)
        with hold(run.run_dir), mirrored(run.checkpoints.mirror, run.run_dir) as mirror:
            check_same({"checkpoints": steps(run.run_dir / FOLDER)})
            return (yield from _Fit(prepared, about, mirror, signals, *how).steps())


def _check_same(about: CheckpointMetadata) -> None:
    """Refuses processes with other configs, data files, versions or flags, before anything is written."""
    versions = {package: version(package) for package in ("jax", "jaxlib", "flax", "optax", "numpy")}
    flags = {name: os.environ.get(name) for name in FLAGS}
    check_same({"config": about.config, "data files": about.files, "versions": versions, "flags": flags})


@dataclass(frozen=True)
class _Fit:
    """A run that is trained, in a directory that no other process uses.

    Args:
      about: the description of the run in its checkpoints, with the fingerprint of its data.
      shows: whether the caller sees each step. Other arguments are those of `meshpar.fit`.
    """

    prepared: Prepared
    about: CheckpointMetadata
    mirror: Mirror
    signals: Signals
    json: bool
    profile: Path | None
    dump_hlo: Path | None
    callbacks: Sequence[Any]
    shows: bool

    @property
    def run(self) -> Run:
        return self.prepared.run

    @property
    def _prints(self) -> bool:
        return not self.json and jax.process_index() == 0

    def steps(self) -> Shown:
        """Trains; yields each step, and returns the last state."""
        run = self.run
        saving = checkpoints(run.run_dir / FOLDER, run.checkpoints, self.about, self.mirror.push)
        recording = recorder(run.run_dir, run.num_steps, self.json, run.loggers)
        order = order_of(run, newest_described(run.run_dir / FOLDER))
        with recording as records, saving as saved, self._copies(order) as copies:
            beginning = beginning_of(self.prepared, saved, copies)
            keep_files_of_source(run)
            if isinstance(beginning, Beginning) and beginning.is_resumed(saved.directory):
                order = order_of(run, beginning.source)
            saved.about = replace(self.about, first_row=order.first, order=order.as_json())
            if self._prints:
                say(announce.start(self.prepared) + announce.encoded_by(run.data))
            loop = self._loop(records, saved, copies, order)
            state = beginning.state() if beginning else self.prepared.compile_init()()
            first, restored = int(state.step), beginning.record() if beginning else {}
            for folder, why in saved.damaged.items():
                records.record("damaged", first, folder=str(folder), why=why)
            if beginning:
                records.record("restored", first, **restored)
            state = yield from loop.steps(state, self.shows)
        self._say_end(first, int(state.step), restored)
        return state

    def _loop(self, records: Recorder, saved: Checkpoints, copies: Copies | None, order: Order) -> Loop:
        """The loop with the compiled step; nothing of the state exists yet."""
        run, prepared = self.run, self.prepared
        train_data, held_out = run.data.datasets(run.seed, prepared.bounds)
        train_data, held_out = of_prompts(train_data.in_order(order), run.loss), of_prompts(held_out, run.loss)
        rollouts = rollouts_of(prepared, train_data)
        evaluate = prepared.lazy_evaluation()
        check_short_batch(run, held_out, evaluate)
        cursor = cursor_of(run.run_dir)
        cursor.at(0, "compiles")
        with busy("compiling the step") if self._prints else nullcontext():
            step = prepared.compile_step()
        self._check_step(step)
        after_first = partial(_check_programs, prepared, step, evaluate)
        if prepared.taught_by and run.distill:
            step = _with_teacher(step, prepared.taught_by, run.distill)
        return Loop(
            step=step,
            evaluate=evaluate,
            train=train_data,
            held_out=held_out,
            recorder=records,
            checkpoints=saved,
            config=run.model_dump(mode="json"),
            num_steps=run.num_steps,
            log_every=run.log_every,
            eval_every=run.eval_every,
            mfu_of=mfu_of(prepared),
            profile=self.profile,
            early_stopping=run.early_stopping,
            callbacks=self.callbacks,
            max_skipped_steps=run.max_skipped_steps,
            check_replicas_every=run.check_replicas_every,
            source=announce.source(run.data),
            signals=self.signals,
            cursor=cursor,
            copies=copies,
            measure=measure_of(prepared),
            after_first=after_first,
            rows=run.data.batch_size if isinstance(run.data, RowData) else None,
            rollouts=rollouts,
        )

    def _check_step(self, step: Step) -> None:
        """Writes the compiled step if asked to, and checks it against the contract and the other processes."""
        if self.dump_hlo:
            self.dump_hlo.write_text(step.text)
        if jax.process_count() > 1:
            check_same({"program": step.fingerprint})
        if self.run.contract:
            self.prepared.inspect(step)

    def _copies(self, order: Order) -> AbstractContextManager[Copies | None]:
        """The copies of the state in the memory of the hosts, if the run makes any."""
        run = self.run
        if run.checkpoints.memory_every is None:
            return nullcontext()
        fixed = {"config": self.about.config, "data files": self.about.files, "order": order.as_json()}
        return closing(Copies(run.run_dir, run.run_dir / FILE, self.prepared.placement.structs, fixed))

    def _say_end(self, first: int, end: int, restored: dict[str, Any]) -> None:
        run = self.run
        if end == first and jax.process_index() == 0:
            say(announce.nothing(run.run_dir, end, restored.get("changed", {})))
        elif self._prints:
            generates = isinstance(run.model, DecoderModel) and not isinstance(run.data.tokenizer, Ids)
            say(announce.end(run.run_dir, end, generates))


def _with_teacher(step: Step, teacher: Prepared, distill: Distill) -> Step:
    """Gives a step the teacher's parameters, and reads nothing else from the teacher's checkpoint."""
    include = ["opt_state.ema.**"] if teacher.run.optim.ema else ["params.**"]
    state = find(distill.teacher, include).restore(teacher.placement.structs, include)

    def put(x: jax.Array, struct: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(x.astype(struct.dtype), struct.sharding)

    return replace(step, given={TEACHER: jax.tree.map(put, averaged(state), step.given[TEACHER])})


def _check_programs(prepared: Prepared, step: Step, evaluate: LazyEvaluation) -> None:
    """Traces the evaluation, which the end of the run needs, and compares the step with its trace.

    Without a contract, a program that cannot be read only causes a warning.
    """
    _ = evaluate.traced
    if prepared.run.contract:
        return
    try:
        prepared.compare(step)
    except ProgramError as error:
        message = f"the compiled step could not be compared with the traced step: {error}"
        warnings.warn(message, ContractWarning, stacklevel=2)
