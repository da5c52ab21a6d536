"""Checkpoints of a train state, by Orbax, with checksums of our own; the only file that knows Orbax.

A checkpoint does not know the mesh: it is restored to whatever shardings the abstract state has. Orbax takes a
flipped bit for data, so that every file's SHA-256 is kept beside it and compared before a restore.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from meshpar.errors import CheckpointError, Problems, nearest
from meshpar.tree import flatten_with_paths

CHECKSUMS = "sha256.json"


class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: made if it is not there.
      keep: how many of the latest steps are kept.

    Raises:
      CheckpointError: nothing can be written there.
    """

    def __init__(self, directory: Path, keep: int = 2):
        import orbax.checkpoint as ocp

        self.directory = directory.absolute()
        _check_writable(self.directory)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def latest(self) -> int | None:
        """The last step of which there is a whole checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, config: dict[str, Any]) -> None:
        """Writes a state, and what is needed to know it again.

        Raises:
          CheckpointError: there is one of this step already; nothing is ever overwritten.
        """
        import orbax.checkpoint as ocp

        if step in self._manager.all_steps():
            raise CheckpointError(f"{self.directory / str(step)} exists already")
        meta = {"step": step, "config": config, "arrays": _described(state)}
        saved = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))  # pyright: ignore
        self._manager.save(step, args=saved)
        folder = self.directory / str(step)
        (folder / CHECKSUMS).write_text(json.dumps(_checksums(folder), indent=2))

    def restore(self, abstract: Any) -> Any:
        """The latest state.

        Args:
          abstract: tree of `ShapeDtypeStruct`s with the shardings that the state shall have.

        Raises:
          CheckpointError: a file was changed, or lists each array that is not as `abstract` says.
        """
        import orbax.checkpoint as ocp

        step = self.latest()
        folder = self.directory / str(step)
        _verify(folder)
        meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]  # pyright: ignore
        _compare(folder, meta["arrays"], _described(abstract))
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))  # pyright: ignore
        return self._manager.restore(step, args=wanted)["state"]

    def close(self) -> None:
        self._manager.close()


@contextmanager
def checkpoints(directory: Path, keep: int = 2) -> Iterator[Checkpoints]:
    """`Checkpoints`, closed at the end."""
    opened = Checkpoints(directory, keep)
    try:
        yield opened
    finally:
        opened.close()


def _check_writable(directory: Path) -> None:
    """By writing: permission bits do not tell the whole truth, and root ignores them."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise CheckpointError(f"run_dir: {directory} cannot be written: {error.strerror}") from None


def _described(state: Any) -> dict[str, str]:
    return {path: f"{np.dtype(x.dtype)}{list(x.shape)}" for path, x in flatten_with_paths(state).items()}


def _compare(folder: Path, saved: dict[str, str], wanted: dict[str, str]) -> None:
    problems = Problems()
    for path in sorted(saved.keys() | wanted.keys()):
        near = nearest(path, saved.keys() - wanted.keys())
        if path not in saved:
            problems.add(path, f"{wanted[path]} is not in the checkpoint", f"it has {near}" if near else "")
        elif path not in wanted:
            problems.add(path, f"{saved[path]} is not in this model or optimizer")
        elif saved[path] != wanted[path]:
            problems.add(path, f"{saved[path]} in the checkpoint, {wanted[path]} in this run")
    heading = f"{folder} is a checkpoint of another model; {len(problems)} arrays differ:"
    if problems:
        problems.add(
            "run_dir", "a run goes on from the checkpoint that it finds", "another run_dir, or the model of this one"
        )
    problems.raise_any(CheckpointError, heading)


def _checksums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    return {str(path.relative_to(folder)): _sha256(path) for path in files}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify(folder: Path) -> None:
    try:
        expected = json.loads((folder / CHECKSUMS).read_text())
    except (OSError, ValueError):
        raise CheckpointError(f"{folder / CHECKSUMS} cannot be read, so the checkpoint cannot be verified") from None
    found, problems = _checksums(folder), Problems()
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            problems.add(
                str(folder / name), "is not what was saved", "remove this step's folder to go on from an earlier one"
            )
    problems.raise_any(CheckpointError, "a checkpoint was changed after it was written:")
