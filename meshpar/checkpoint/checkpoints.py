"""The checkpoints that a run writes, and goes on from.

    checkpoints/300/state/        the arrays, a folder each
    checkpoints/300/meta.json     step, time, config; of each array type, shape and dims; data position, keys, metric
    checkpoints/300/sha256.json   a checksum of each of these files

A step is written as `300.partial` and gets its name, checksums and all, by one rename: what bears a number is whole,
whenever the process was killed. A checkpoint does not know the mesh: it is restored to whatever shardings are asked
for. Orbax takes a flipped bit for data, hence the checksums, which are compared before anything is restored.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshpar.checkpoint import checksums
from meshpar.checkpoint.arrays import Writer
from meshpar.checkpoint.kept import Kept
from meshpar.checkpoint.saved import META, STATE, Saved, steps
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
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    dims: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    seed: int | None = None
    batch_size: int | None = None

    def at(self, step: int, state: Any) -> dict[str, Any]:
        """JSON data about a step."""
        rows = None if self.batch_size is None else step * self.batch_size
        return {
            "step": step,
            "saved": datetime.now(UTC).isoformat(timespec="seconds"),
            "config": self.config,
            "arrays": {path: self._array(path, x) for path, x in flatten_with_paths(state).items()},
            "data": {"next_batch": step, "rows_read": rows, "seed": self.seed},
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
        self.kept, self.about = kept or Kept(), about or About()
        _check_writable(self.directory)
        self._arrays = Writer()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def latest(self) -> int | None:
        """The last step of which there is a whole checkpoint."""
        return max(steps(self.directory), default=None)

    def save(self, step: int, state: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Copies a state to the host, and writes it while the caller goes on: the state may be donated at once.

        Waits for the save before this one. All processes call it.

        Args:
          state: tree of arrays.
          metrics: of the evaluation at this step, if there was one.

        Raises:
          CheckpointError: there is a checkpoint of this step; nothing is ever overwritten. Or it is being written, but
            the best cannot be told, since the metric is not among `metrics`.
        """
        self.wait()
        if step in steps(self.directory):
            raise CheckpointError(f"{self.directory / str(step)} exists, and a checkpoint is never overwritten")
        name, metrics = self.kept.metric, metrics or {}
        value = metrics.get(name)
        finite = value if value is not None and math.isfinite(value) else None  # JSON has no NaN
        metric = {"name": name, "best": self.kept.best, "value": finite}
        meta = self.about.at(step, state) | {"metric": metric}
        if jax.process_index() == 0:
            _remove(self.directory.glob("*.partial"))  # of processes that were killed
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
        """The latest state, whole: see `Saved.restore`.

        Raises:
          CheckpointError: there is none; or a file was changed; or it lists each array that is not as in `abstract`.
        """
        step = self.latest()
        if step is None:
            raise CheckpointError(f"there is no checkpoint in {self.directory}")
        return Saved(self.directory / str(step)).restore(abstract)

    def close(self) -> None:
        """Waits, and ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._arrays.close()

    def _commit(self, step: int, meta: dict[str, Any]) -> None:
        self._arrays.wait()
        if jax.process_index() > 0:
            return
        partial = self._partial(step)
        (partial / META).write_text(json.dumps(meta, indent=2))
        checksums.write(partial)
        partial.rename(self.directory / str(step))
        self._prune()

    def _prune(self) -> None:
        """Damage is told by who restores: here, what cannot be read stays where it is."""
        metrics: dict[int, float | None] = {}
        for step in steps(self.directory):
            with suppress(CheckpointError):
                metrics[step] = Saved(self.directory / str(step)).meta["metric"]["value"]
        _remove(self.directory / str(step) for step in metrics.keys() - self.kept.chosen(metrics))

    def _partial(self, step: int) -> Path:
        return self.directory / f"{step}.partial"


@contextmanager
def checkpoints(directory: Path, kept: Kept | None = None, about: About | None = None) -> Iterator[Checkpoints]:
    """`Checkpoints`, closed at the end: what was saved is on disk then."""
    opened = Checkpoints(directory, kept, about)
    try:
        yield opened
    finally:
        opened.close()


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)


def _check_writable(directory: Path) -> None:
    """By writing: permission bits do not tell the whole truth, and root ignores them."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise CheckpointError(f"run_dir: {directory} cannot be written: {error.strerror}") from None
