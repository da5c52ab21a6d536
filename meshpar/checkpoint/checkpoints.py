"""The checkpoints that a run writes, and goes on from.

    checkpoints/300/state/        the arrays, a folder each
    checkpoints/300/meta.json     step, time, config; of each array type, shape and dims; data position, keys, metric
    checkpoints/300/sha256.json   a checksum of each of these files

A step is written as `300.1a2b3c.partial`, synced, and gets its name, checksums and all, by one rename: a folder with a
number is whole, whether the process was killed or the power was cut. One process writes at a time, and each writer has
partial folders of its own. A checkpoint that is too old loses its number before its files are removed.

A checkpoint does not know the mesh: it is restored to whatever shardings are asked for. Orbax takes a flipped bit for
data, hence the checksums, which are compared before anything is restored. If the latest checkpoint is damaged, a run
goes on from the one before it, and renames the damaged one `300.damaged` when it saves its next one.
"""

from __future__ import annotations

import errno
import json
import math
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
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
from meshpar.checkpoint.kept import Kept
from meshpar.checkpoint.meta import FORMAT
from meshpar.checkpoint.saved import META, STATE, Saved, newest_whole, steps
from meshpar.errors import CheckpointError
from meshpar.tree import flatten_with_paths


@dataclass(frozen=True)
class About:
    """What a checkpoint says of its run, for whoever asks.

    Args:
      config: JSON data.
      dims: path of an array -> names of its dims.
      seed: of the order of the data, and of the random keys.
      batch_size: rows a batch.
      files: name -> checksum of each file of the data.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    dims: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    seed: int | None = None
    batch_size: int | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    def at(self, step: int, state: Any) -> dict[str, Any]:
        """JSON data about a step."""
        rows = None if self.batch_size is None else step * self.batch_size
        return {
            "format": FORMAT,
            "step": step,
            "saved": datetime.now(UTC).isoformat(timespec="seconds"),
            "config": self.config,
            "arrays": {path: self._array(path, x) for path, x in flatten_with_paths(state).items()},
            "data": {"next_batch": step, "rows_read": rows, "seed": self.seed}
            | ({"files": self.files} if self.files else {}),
            "random": {"seed": self.seed, "impl": jax.config.jax_default_prng_impl, "folded_in": step},  # pyright: ignore
        }

    def _array(self, path: str, x: Any) -> dict[str, Any]:
        dims = self.dims.get(path)
        return {"dtype": str(np.dtype(x.dtype)), "shape": list(x.shape), "dims": dims and list(dims)}


class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: made if it is not there; one that all processes see.
      kept: which stay.
      about: what each says of the run.

    Raises:
      CheckpointError: nothing can be written there.

    Example:
      >>> import jax.numpy as jnp
      >>> state = {"step": jnp.int32(3), "w": jnp.arange(4.0)}
      >>> with tempfile.TemporaryDirectory() as run_dir, checkpoints(Path(run_dir)) as saved:
      ...     saved.save(3, state)
      ...     saved.wait()
      ...     saved.latest(), saved.restore(jax.eval_shape(lambda: state))["w"]
      (3, Array([0., 1., 2., 3.], dtype=float32))
    """

    def __init__(self, directory: Path, kept: Kept | None = None, about: About | None = None):
        self.directory = directory.absolute()
        self.kept = kept or Kept()
        self.about = about or About()
        self.damaged: dict[Path, str] = {}
        _check_writable(self.directory)
        self._arrays = Writer()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._held = ExitStack()
        self._writer: str | None = None
        self._is_locked = False

    def latest(self) -> int | None:
        """The last step of which there is a checkpoint that was not found to be damaged; see `newest`."""
        found = (step for step in steps(self.directory) if self.directory / str(step) not in self.damaged)
        return max(found, default=None)

    def newest(self, abstract: Any) -> Saved | None:
        """The last checkpoint that is whole; None if there is no checkpoint. All processes call it.

        A warning tells of each damaged one after it. They are listed in `damaged`, and renamed at the next save.

        Args:
          abstract: tree of `ShapeDtypeStruct`s: what will be restored, and is verified.

        Raises:
          CheckpointError: all are damaged; or it lists each array that is not as in `abstract`.
        """
        found = [Saved(self.directory / str(step)) for step in steps(self.directory)]
        if not found:
            return None
        newest, self.damaged = newest_whole(found, lambda saved: saved.check(abstract, config=self.about.config))
        return newest

    def save(self, step: int, state: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Copies a state to the host, and writes it while the caller goes on: the state may be donated at once.

        Waits for the save before this one. All processes call it.

        Args:
          state: tree of arrays.
          metrics: of the evaluation at this step, if there was one.

        Raises:
          CheckpointError: there is a checkpoint of this step; nothing is ever overwritten. Another process writes into
            this folder. Or the state is being written, but the best cannot be told, since the metric is not among
            `metrics`.
        """
        self.wait()
        self._begin_writing()
        folder = self.directory / str(step)
        if folder.is_dir() and folder not in self.damaged:
            raise self._exists(step)
        name = self.kept.metric
        metrics = metrics or {}
        value = metrics.get(name)
        finite = value if value is not None and math.isfinite(value) else None  # JSON has no NaN
        metric = {"name": name, "best": self.kept.best, "value": finite}
        meta = self.about.at(step, state) | {"metric": metric}
        if jax.process_index() == 0 and self._is_locked:
            for partial in self.directory.glob("*.partial"):  # their writers were killed
                shutil.rmtree(partial)
        self._arrays.write(self._partial(step) / STATE, flatten_with_paths(state))
        self._pending = self._thread.submit(self._commit, step, meta)
        if self.kept.keep_best and metrics and name not in metrics:
            raise CheckpointError(f"checkpoints.metric: an evaluation has no {name}, but {', '.join(metrics)}")

    def wait(self) -> None:
        """Returns when the last save is on disk; raises what went wrong there."""
        pending, self._pending = self._pending, None
        if pending:
            pending.result()

    def restore(self, abstract: Any) -> Any:
        """The latest state that is whole: see `newest`, and `Saved.restore`.

        Raises:
          CheckpointError: there is none; or it lists each array that is not as in `abstract`.
        """
        newest = self.newest(abstract)
        if newest is None:
            raise CheckpointError(f"there is no checkpoint in {self.directory}")
        return newest.restore(abstract)

    def close(self) -> None:
        """Waits, ends the thread, and lets others write."""
        with self._held:
            try:
                self.wait()
            finally:
                self._thread.shutdown()
                self._arrays.close()

    def _begin_writing(self) -> None:
        """Who only reads needs no lock."""
        if self._writer is None:
            self._is_locked = self._held.enter_context(lock.hold(self.directory))
            self._writer = f"{of_first(secrets.randbits(31)):08x}"

    def _commit(self, step: int, meta: dict[str, Any]) -> None:
        try:
            self._arrays.wait()
            if jax.process_index() == 0:
                self._name(step, meta)
        except BaseException:
            if jax.process_index() == 0:
                shutil.rmtree(self._partial(step), ignore_errors=True)  # the disk may be full
            raise
        self.damaged = {}

    def _name(self, step: int, meta: dict[str, Any]) -> None:
        """Gives a step its number, once it would survive a power cut; then removes what is too old."""
        partial = self._partial(step)
        (partial / META).write_text(json.dumps(meta, indent=2))
        checksums.write(partial)
        sync_tree(partial)
        self._move_aside(step)
        try:
            partial.rename(self.directory / str(step))
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):  # another writer's, where there are no locks
                raise self._exists(step) from None
            raise
        sync(self.directory)
        self._prune()

    def _move_aside(self, step: int) -> None:
        """Renames damaged checkpoints, which would stay the latest, and a file that bears the number of the step."""
        named = self.directory / str(step)
        for path in [*self.damaged, *([named] if named.is_file() else [])]:
            aside = path.with_name(f"{path.name}.damaged")
            while aside.exists():
                aside = path.with_name(f"{aside.name}-again")
            path.rename(aside)

    def _prune(self) -> None:
        """Removes what is too old, after it has lost its number. What is damaged stays where it is."""
        metrics: dict[int, float | None] = {}
        for step in steps(self.directory):
            with suppress(CheckpointError):
                metrics[step] = Saved(self.directory / str(step)).meta["metric"]["value"]
        removed = metrics.keys() - self.kept.chosen(metrics)
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
def checkpoints(directory: Path, kept: Kept | None = None, about: About | None = None) -> Iterator[Checkpoints]:
    """`Checkpoints`, closed at the end: what was saved is on disk then."""
    opened = Checkpoints(directory, kept, about)
    try:
        yield opened
    finally:
        opened.close()


def _check_writable(directory: Path) -> None:
    """By writing: permission bits do not tell the whole truth, and root ignores them."""
    try:
        make_folder(directory)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise CheckpointError(f"run_dir: {directory} cannot be written: {error.strerror}") from None
