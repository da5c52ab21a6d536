"""Writes the checkpoints of a run, and finds the one from which it resumes.

    checkpoints/300/state/        the arrays, a folder each
    checkpoints/300/meta.json     step, time, config; dtype, shape and dims of each array; data position, keys, metric
    checkpoints/300/sha256.json   a checksum of each of these files

A step is written as `300.1a2b3c.partial`, synced, and renamed to `300`: a folder with a number is complete, even after
a kill or a power cut. One process writes at a time, and each writer has its own partial folders. An old checkpoint is
renamed before its files are removed.

A checkpoint does not depend on the mesh: it can be restored to any shardings. Orbax does not notice a flipped bit, so
checksums are compared before anything is restored. If the latest checkpoint is damaged, the run resumes from the one
before it, and renames the damaged one to `300.damaged` at its next save.
"""

from __future__ import annotations

import errno
import json
import math
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshpar.checkpoint import checksums, lock
from meshpar.checkpoint.agree import of_first
from meshpar.checkpoint.arrays import Writer
from meshpar.checkpoint.durable import make_folder, sync, sync_tree
from meshpar.checkpoint.meta import FORMAT
from meshpar.checkpoint.retention import Retention
from meshpar.checkpoint.saved import FOLDER, META, STATE, Checkpoint, newest_whole, steps
from meshpar.errors import CheckpointError
from meshpar.regular_files import remote
from meshpar.tree import flatten_with_paths


@dataclass(frozen=True)
class CheckpointMetadata:
    """The description of a run in the `meta.json` of its checkpoints.

    Args:
      config: the run's config, as JSON data.
      dims: path of an array -> names of its dims.
      seed: the seed of the data order and of the random keys.
      batch_size: rows per batch.
      files: name -> checksum of each data file.
      first_row: the row with which step 0 would begin, if all steps had had this batch size.
      order: further data that determine which row is read when, as JSON data.

    >>> CheckpointMetadata(batch_size=4).at(3, {})["data"]
    {'next_batch': 3, 'rows_read': 12, 'seed': None}
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    dims: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    seed: int | None = None
    batch_size: int | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    first_row: int = 0
    order: Mapping[str, Any] | None = None

    def at(self, step: int, state: Any) -> dict[str, Any]:
        """The content of `meta.json` for a step, without the metric."""
        arrays = {
            path: {"dtype": str(np.dtype(x.dtype)), "shape": list(x.shape), "dims": self.dims.get(path)}
            for path, x in flatten_with_paths(state).items()
        }
        rows = None if self.batch_size is None else self.first_row + step * self.batch_size
        data: dict[str, Any] = {"next_batch": step, "rows_read": rows, "seed": self.seed}
        if self.order:
            data["order"] = self.order
        if self.files:
            data["files"] = self.files
        return {
            "format": FORMAT,
            "step": step,
            "saved": datetime.now(UTC).isoformat(timespec="seconds"),
            "config": self.config,
            "arrays": arrays,
            "data": data,
            "random": {"seed": self.seed, "impl": jax.config.jax_default_prng_impl, "folded_in": step},  # pyright: ignore
        }


class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: created if missing; on a file system that all processes share. Of the folder of a run, its checkpoints.
      retention: which checkpoints to keep.
      about: the description of the run in each checkpoint.
      after_save: called in the first process when a checkpoint is on disk, in the thread that writes it.

    Raises:
      CheckpointError: the directory cannot be written, or is a remote address.

    Examples:
      >>> import jax.numpy as jnp
      >>> state = {"step": jnp.int32(3), "w": jnp.arange(4.0)}
      >>> with tempfile.TemporaryDirectory() as run_dir, checkpoints(Path(run_dir)) as saved:
      ...     saved.save(3, state)
      ...     saved.wait()
      ...     saved.latest(), saved.restore(jax.eval_shape(lambda: state))["w"]
      (3, Array([0., 1., 2., 3.], dtype=float32))
    """

    def __init__(
        self,
        directory: Path | str,
        retention: Retention | None = None,
        about: CheckpointMetadata | None = None,
        after_save: Callable[[], None] = lambda: None,
    ):
        if problem := remote(directory):
            raise CheckpointError("; ".join(problem))
        self.directory = Path(directory).absolute()
        if (self.directory / FOLDER).is_dir():
            self.directory /= FOLDER
        self.retention = retention or Retention()
        self.about = about or CheckpointMetadata()
        self.after_save = after_save
        self.damaged: dict[Path, str] = {}
        try:
            make_folder(self.directory)
            with tempfile.TemporaryFile(dir=self.directory):  # permission bits are unreliable, and root ignores them
                pass
        except OSError as error:
            raise CheckpointError(f"run_dir: {self.directory} cannot be written: {error.strerror}") from None
        self._arrays: Writer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._held = ExitStack()
        self._writer: str | None = None
        self._is_locked = False

    def latest(self) -> int | None:
        """The step of the last checkpoint that is not known to be damaged; see `newest`."""
        found = (step for step in steps(self.directory) if self.directory / str(step) not in self.damaged)
        return max(found, default=None)

    def newest(self, abstract: Any) -> Checkpoint | None:
        """The last undamaged checkpoint; None if there is no checkpoint. All processes call it.

        It warns about each later, damaged one, adds it to `damaged`, and renames it at the next save.

        Args:
          abstract: tree of `ShapeDtypeStruct`s that will be restored, or a function: checkpoint -> such a tree. Only
            their files are verified.

        Raises:
          CheckpointError: all are damaged; or it lists each array that differs from `abstract`.
        """

        def check(saved: Checkpoint) -> None:
            saved.check(abstract(saved) if callable(abstract) else abstract, config=self.about.config)

        found = [Checkpoint(self.directory / str(step)) for step in steps(self.directory)]
        if not found:
            return None
        newest, self.damaged = newest_whole(found, check)
        return newest

    def save(self, step: int, state: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Copies a state to the host and writes it in the background: the state may be donated at once.

        Waits for the previous save. All processes call it.

        Args:
          state: tree of arrays.
          metrics: the metrics of the evaluation at this step, if there was one.

        Raises:
          CheckpointError: this step already has a checkpoint, which is never overwritten; another process writes into
            this folder; the metric that ranks checkpoints is not in `metrics` (the state is written nevertheless); or
            the state is a `TrainState` that is prepared for a step.
        """
        if getattr(state, "is_prepared", False):
            what = "the layers of this state are prepared for its step, and a checkpoint has them as in the model"
            raise CheckpointError(f"{what}: save step.finish(state)")
        self.wait()
        if self._arrays is None:  # only writers need the lock, and Orbax
            self._is_locked = self._held.enter_context(lock.hold(self.directory))
            self._writer = f"{of_first(secrets.randbits(31)):08x}"
            self._arrays = self._held.enter_context(closing(Writer()))
        folder = self.directory / str(step)
        if folder.is_dir() and folder not in self.damaged:
            raise self._exists(step)
        name = self.retention.metric
        metrics = metrics or {}
        value = metrics.get(name, math.nan)
        finite = value if math.isfinite(value) else None  # JSON has no NaN
        meta = self.about.at(step, state) | {"metric": {"name": name, "best": self.retention.best, "value": finite}}
        if jax.process_index() == 0 and self._is_locked:
            for partial in self.directory.glob("*.partial"):  # their writers were killed
                shutil.rmtree(partial)
        self._arrays.write(self._partial(step) / STATE, flatten_with_paths(state))
        self._pending = self._thread.submit(self._commit, self._arrays, step, meta)
        if self.retention.keep_best and metrics and name not in metrics:
            raise CheckpointError(f"checkpoints.metric: an evaluation has no {name}, but {', '.join(metrics)}")

    def wait(self) -> None:
        """Returns when the last save is on disk; raises its error if it failed."""
        pending = self._pending
        self._pending = None
        if pending:
            pending.result()

    def restore(self, abstract: Any) -> Any:
        """The state of the last undamaged checkpoint: see `newest` and `Checkpoint.restore`.

        Raises:
          CheckpointError: there is no checkpoint; or it lists each array that differs from `abstract`.
        """
        newest = self.newest(abstract)
        if newest is None:
            raise CheckpointError(f"there is no checkpoint in {self.directory}")
        return newest.restore(abstract)

    def distrust(self, step: int) -> None:
        """Renames the checkpoints after a step: their arrays may be wrong although their files are not damaged."""
        if jax.process_index() == 0:
            later = [self.directory / str(found) for found in steps(self.directory) if found > step]
            self._rename(later)
            sync(self.directory)

    def close(self) -> None:
        """Waits for the last save, ends the thread and releases the lock."""
        with self._held:
            try:
                self.wait()
            finally:
                self._thread.shutdown()

    def _commit(self, arrays: Writer, step: int, meta: dict[str, Any]) -> None:
        try:
            arrays.wait()
            if jax.process_index() == 0:
                self._name(step, meta)
                self.after_save()
        except BaseException:
            if jax.process_index() == 0:
                shutil.rmtree(self._partial(step), ignore_errors=True)  # the disk may be full
            raise
        self.damaged = {}

    def _name(self, step: int, meta: dict[str, Any]) -> None:
        """Syncs a step to disk and renames its folder to its number; then removes old checkpoints."""
        partial = self._partial(step)
        (partial / META).write_text(json.dumps(meta, indent=2))
        checksums.write(partial)
        sync_tree(partial)
        self._move_aside(step)
        try:
            partial.rename(self.directory / str(step))
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):  # by another writer, on a file system without locks
                raise self._exists(step) from None
            raise
        sync(self.directory)
        self._prune()

    def _move_aside(self, step: int) -> None:
        """Renames damaged checkpoints, which would stay the latest, and a file whose name is the step's number."""
        blocking = [path for path in [self.directory / str(step)] if path.is_file()]
        self._rename([*self.damaged, *blocking])

    def _rename(self, folders: Iterable[Path]) -> None:
        for path in folders:
            aside = path.with_name(f"{path.name}.damaged")
            while aside.exists():
                aside = path.with_name(f"{aside.name}-again")
            path.rename(aside)

    def _prune(self) -> None:
        """Removes old checkpoints, which are renamed first. Damaged checkpoints are not removed."""
        metrics: dict[int, float | None] = {}
        for step in steps(self.directory):
            with suppress(CheckpointError):
                metrics[step] = Checkpoint(self.directory / str(step)).meta["metric"]["value"]
        removed = metrics.keys() - self.retention.chosen(metrics)
        for step in removed:
            (self.directory / str(step)).rename(self._partial(step))
        sync(self.directory)
        for step in removed:
            shutil.rmtree(self._partial(step))

    def _partial(self, step: int) -> Path:
        return self.directory / f"{step}.{self._writer}.partial"

    def _exists(self, step: int) -> CheckpointError:
        return CheckpointError(f"{self.directory / str(step)} exists, and a checkpoint is never overwritten")


@contextmanager
def checkpoints(
    directory: Path | str,
    retention: Retention | None = None,
    about: CheckpointMetadata | None = None,
    after_save: Callable[[], None] = lambda: None,
) -> Iterator[Checkpoints]:
    """`Checkpoints` for a `with` statement, at whose end every save is on disk.

    Args:
      directory, retention, about, after_save: see `Checkpoints`.

    Raises:
      CheckpointError: the directory cannot be written; or, at the end, the last save failed.

    >>> with tempfile.TemporaryDirectory() as run_dir, checkpoints(Path(run_dir)) as saved:
    ...     saved.latest() is None
    True
    """
    with closing(Checkpoints(directory, retention, about, after_save)) as opened:
        yield opened
