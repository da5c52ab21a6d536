"""Records the step and the phase of a process in a small file, which the launcher reads when a run hangs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import jax

CURSORS = Path("logs/cursors")
"""The folder in a run directory that contains one file for each process, named by its index."""
FILE = "MESHPAR_CURSOR"
"""The environment variable with which `meshpar launch` names the file of a process."""


@dataclass(frozen=True)
class Position:
    """The position of a process.

    Args:
      step: the last step that the process began.
      phase: the activity of the process, such as "evaluates".
      age_s: seconds since the process wrote this position.
    """

    step: int
    phase: str
    age_s: float

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}, for {self.age_s:.0f} s"


class Cursor:
    """Writes the position of this process to a file; does nothing without one. A write takes about a microsecond.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     Cursor(Path(folder) / "0").at(7, "saves")
    ...     position = read(Path(folder) / "0")
    >>> position.step, position.phase
    (7, 'saves')
    """

    def __init__(self, path: Path | None = None):
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)

    def at(self, step: int, phase: str) -> None:
        if self._file is not None:
            os.pwrite(self._file, f"{step} {phase:<20}\n".encode(), 0)


def of_process(run_dir: Path) -> Cursor:
    """This process's cursor, in the file that `meshpar launch` names or in `run_dir`; a single process has no file."""
    if file := os.environ.get(FILE):
        return Cursor(Path(file))
    return Cursor(run_dir / CURSORS / str(jax.process_index()) if jax.process_count() > 1 else None)


def read(path: Path) -> Position | None:
    """The position in a file; None if the process has not begun."""
    try:
        step, _, phase = path.read_text().partition("\n")[0].partition(" ")
        return Position(int(step), phase.strip(), max(0.0, time.time() - path.stat().st_mtime))
    except (OSError, ValueError):
        return None
