"""Checkpoints of a train state, by Orbax, with checksums of our own; the only file that knows Orbax.

    checkpoints/300/state/        the arrays, as Orbax writes them
    checkpoints/300/meta.json     the step, the run's config, type and shape of each array
    checkpoints/300/sha256.json   a checksum of each of these files

A step is written as `300.partial` and gets its name, checksums and all, by one rename: what bears a number is whole,
whenever the process was killed. A checkpoint does not know the mesh: it is restored to whatever shardings are asked
for. Orbax takes a flipped bit for data, hence the checksums, which are compared before anything is restored.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshpar.errors import CheckpointError, Problems
from meshpar.tree import flatten_with_paths

STATE, META, CHECKSUMS = "state", "meta.json", "sha256.json"


class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: made if it is not there; one that all processes see.
      keep: how many of the latest steps are kept.

    Raises:
      CheckpointError: nothing can be written there.

    Example:
      >>> import jax.numpy as jnp
      >>> state = {"step": jnp.int32(3), "w": jnp.arange(4.0)}
      >>> with tempfile.TemporaryDirectory() as run_dir, checkpoints(Path(run_dir)) as saved:
      ...     saved.save(3, state, {"seed": 0})
      ...     saved.wait()
      ...     saved.latest(), saved.restore(jax.eval_shape(lambda: state))["w"]
      (3, Array([0., 1., 2., 3.], dtype=float32))
    """

    def __init__(self, directory: Path, keep: int = 2):
        self.directory = directory.absolute()
        self.keep = keep
        _check_writable(self.directory)
        import orbax.checkpoint as ocp  # slow, so not before the folder is known to be good

        self._orbax = ocp.StandardCheckpointer()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def latest(self) -> int | None:
        """The last step of which there is a whole checkpoint."""
        return max(self._steps(), default=None)

    def save(self, step: int, state: Any, config: dict[str, Any]) -> None:
        """Copies a state to the host, and writes it while the caller goes on: the state may be donated at once.

        Waits for the save before this one. All processes call it.

        Args:
          state: tree of arrays.
          config: JSON data, kept beside the arrays for whoever asks what they are.

        Raises:
          CheckpointError: there is a checkpoint of this step; nothing is ever overwritten.
        """
        self.wait()
        if step in self._steps():
            raise CheckpointError(f"{self.directory / str(step)} exists, and a checkpoint is never overwritten")
        meta = {"step": step, "config": config, "arrays": _described(state)}
        if jax.process_index() == 0:
            self._remove(self.directory.glob("*.partial"))  # of processes that were killed
        self._orbax.save(self._partial(step) / STATE, state)
        self._pending = self._thread.submit(self._commit, step, meta)

    def wait(self) -> None:
        """Returns when the last save is on disk; raises what went wrong there."""
        pending, self._pending = self._pending, None
        if pending:
            pending.result()

    def restore(self, abstract: Any) -> Any:
        """The latest state, each device reading its own shard.

        Args:
          abstract: tree of `ShapeDtypeStruct`s; their shardings may be other than those of the state that was saved.

        Raises:
          CheckpointError: there is none; or a file was changed; or it lists each array that is not as in `abstract`.
        """
        step = self.latest()
        if step is None:
            raise CheckpointError(f"there is no checkpoint in {self.directory}")
        folder = self.directory / str(step)
        _verify(folder)
        _compare(folder, json.loads((folder / META).read_text())["arrays"], _described(abstract))
        return self._orbax.restore(folder / STATE, abstract)

    def close(self) -> None:
        """Waits, and ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._orbax.close()

    def _commit(self, step: int, meta: dict[str, Any]) -> None:
        self._orbax.wait_until_finished()  # all processes'
        if jax.process_index() > 0:
            return
        partial = self._partial(step)
        (partial / META).write_text(json.dumps(meta, indent=2))
        (partial / CHECKSUMS).write_text(json.dumps(_checksums(partial), indent=2))
        partial.rename(self.directory / str(step))
        self._remove(self.directory / str(old) for old in self._steps()[: -self.keep])

    def _steps(self) -> list[int]:
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdecimal())

    def _partial(self, step: int) -> Path:
        return self.directory / f"{step}.partial"

    @staticmethod
    def _remove(folders: Iterator[Path]) -> None:
        for folder in folders:
            shutil.rmtree(folder)


def read_params(directory: Path, structs: Any) -> Any:
    """The parameters of the latest checkpoint, and nothing else of it; each device reads its own shard.

    Args:
      structs: tree of `ShapeDtypeStruct`s with shardings.

    Raises:
      CheckpointError: see `Checkpoints.restore`.
    """
    import orbax.checkpoint as ocp

    folder, wanted = latest(directory.absolute()), {"params": structs}
    _verify(folder)
    saved = json.loads((folder / META).read_text())["arrays"]
    _compare(folder, {path: x for path, x in saved.items() if path.startswith("params.")}, _described(wanted))
    how = ocp.args.PyTreeRestore(
        wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
    )
    with ocp.PyTreeCheckpointer() as reader:
        return reader.restore(folder / STATE, args=how)["params"]


def saved_config(directory: Path) -> dict[str, Any]:
    """The config of the run that wrote the latest checkpoint."""
    return json.loads((latest(directory) / META).read_text())["config"]


def latest(directory: Path) -> Path:
    """The folder of the latest checkpoint. Raises CheckpointError if there is none."""
    steps = [int(path.name) for path in directory.iterdir() if path.name.isdecimal()] if directory.is_dir() else []
    if not steps:
        raise CheckpointError(f"there is no checkpoint in {directory}")
    return directory / str(max(steps))


@contextmanager
def checkpoints(directory: Path, keep: int = 2) -> Iterator[Checkpoints]:
    """`Checkpoints`, closed at the end: what was saved is on disk then."""
    opened = Checkpoints(directory, keep)
    try:
        yield opened
    finally:
        opened.close()


def _check_writable(directory: Path) -> None:
    """By writing: permission bits do not tell the whole truth, and root ignores them."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise CheckpointError(f"run_dir: {directory} cannot be written: {error.strerror}") from None


def _described(state: Any) -> dict[str, str]:
    """Path -> type and shape: `params.embed.table` -> `float32[257, 64]`."""
    return {path: f"{np.dtype(x.dtype)}{list(x.shape)}" for path, x in flatten_with_paths(state).items()}


def _compare(folder: Path, saved: dict[str, str], wanted: dict[str, str]) -> None:
    differ = [path for path in sorted(saved.keys() | wanted.keys()) if saved.get(path) != wanted.get(path)]
    # The optimizer's arrays are like the model's: where those differ, they say nothing new.
    of_model = [path for path in differ if not path.startswith("opt_state.")]
    problems = Problems()
    for path in of_model or differ:
        if path not in saved:
            problems.add(path, f"{wanted[path]} in this run, missing in the checkpoint")
        elif path not in wanted:
            problems.add(path, f"{saved[path]} in the checkpoint, unknown to this run")
        else:
            problems.add(path, f"{saved[path]} in the checkpoint, {wanted[path]} in this run")
    other = "model" if of_model else "optimizer"
    arrays = f"{len(problems)} array{'s' * (len(problems) > 1)}"
    fix = f"set another run_dir, or the config in its {META}"
    problems.raise_any(CheckpointError, f"{folder} is of another {other}, by {arrays}; {fix}:")


def _checksums(folder: Path) -> dict[str, str]:
    """Path below `folder` -> SHA-256, of every file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): _sha256(path) for path in files}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify(folder: Path) -> None:
    problems = Problems()
    for name, expected in _expected(folder).items():
        path = folder / name
        if not path.is_file():
            problems.add(str(path), "is missing")
        elif _sha256(path) != expected:
            problems.add(str(path), "is not what was written")
    fix = "remove the folder to go on from the step before it"
    problems.raise_any(CheckpointError, f"the checkpoint {folder} is damaged; {fix}:")


def _expected(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / CHECKSUMS).read_text()))
    except (OSError, ValueError, TypeError):
        raise CheckpointError(f"{folder / CHECKSUMS} cannot be read, so the checkpoint cannot be verified") from None
