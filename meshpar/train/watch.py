"""Shows what a run is doing, from its files alone, for `meshpar watch`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshpar.checkpoint.lock import is_held
from meshpar.checkpoint.saved import FOLDER, steps
from meshpar.mesh import cursor
from meshpar.mesh.cursor import CURSORS, Position
from meshpar.records.file import FILE, read
from meshpar.records.goodput import goodput, restarts
from meshpar.records.loggers import Record
from meshpar.records.terminal import FORMATS

LOOKS = 20
"""The number of last looks among which a straggler is searched."""
FEWEST = 3
SHARE = 0.8
"""The fraction of the looks with a difference in which a straggler is the only process behind."""
ROWS, COLUMNS = 8, 60
BLOCKS = " ▁▂▃▄▅▆▇█"
SHOWN = ("loss", "tokens_per_s", "rows_per_s", "step_s", "data_wait", "mfu", "lr")


@dataclass
class Watch:
    """Shows a run each time that `look` is called.

    Args:
      run_dir: of the run, on a file system that this machine sees.
      looks: the positions of all processes in the last looks.
    """

    run_dir: Path
    looks: deque[dict[int, Position]] = field(default_factory=lambda: deque(maxlen=LOOKS))

    def look(self) -> RenderableType:
        """The run as it is now."""
        records = read(self.run_dir / FILE)
        positions = processes(self.run_dir)
        if positions:
            self.looks.append(positions)
        train = [record for record in records if record["kind"] == "train"]
        losses = [record["loss"] for record in train if record.get("loss") is not None]
        parts: list[RenderableType] = [Text(_heading(self.run_dir, records, train))]
        if losses:
            parts.append(Text(chart(losses)))
        if train:
            parts.append(Text("  ".join(FORMATS[name].format(train[-1][name]) for name in SHOWN if name in train[-1])))
        parts.append(Text(_checkpoint(self.run_dir)))
        if positions:
            parts.append(_table(positions, straggler(self.looks)))
        return Group(*parts)


def processes(run_dir: Path) -> dict[int, Position]:
    """Index -> position of each process that has begun. A run in a single process has none."""
    folder = run_dir / CURSORS
    files = [path for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
    found = {int(path.name): cursor.read(path) for path in files}
    return {index: found[index] for index in sorted(found) if found[index]}  # pyright: ignore[reportReturnType]


def straggler(looks: Sequence[Mapping[int, Position]]) -> int | None:
    """The process that all others wait for; None if there is none.

    Processes run a few steps ahead of their devices, and wait for a process whose host is slow, for example because of
    its data. In several looks this process has begun fewer steps than the others; in a single look any process may be
    behind. A slow device is not found, because all hosts wait for it alike.

    >>> looks = [{0: Position(7, "trains", 0.1), 1: Position(5, "reads data", 0.1)}] * 3
    >>> straggler(looks)
    1
    """
    if len(looks) < FEWEST:
        return None
    behind: list[int | None] = []
    for positions in looks:
        least = min(position.step for position in positions.values())
        last = [index for index, position in positions.items() if position.step == least]
        if len(last) < len(positions):
            behind.append(last[0] if len(last) == 1 else None)
    for index in set(behind) - {None}:
        if len(behind) >= len(looks) / 2 and behind.count(index) >= SHARE * len(behind):
            return index
    return None


def chart(values: Sequence[float]) -> str:
    """Draws values as columns, over time from left to right.

    >>> print(chart([4.0, 3.0, 2.0]).splitlines()[0])
        4.00 █
    """
    columns = [values[i * len(values) // COLUMNS] for i in range(COLUMNS)] if len(values) > COLUMNS else list(values)
    low = min(columns)
    high = max(columns)
    eighths = [round((value - low) / ((high - low) or 1) * (8 * ROWS - 1)) + 1 for value in columns]
    lines = []
    for row in range(ROWS - 1, -1, -1):
        label = f"{high if row == ROWS - 1 else low:8.2f}" if row in (0, ROWS - 1) else " " * 8
        lines.append(f"{label} {''.join(BLOCKS[min(max(height - 8 * row, 0), 8)] for height in eighths)}".rstrip())
    return "\n".join(lines)


def _heading(run_dir: Path, records: Sequence[Record], train: Sequence[Record]) -> str:
    """The step, the time that is left of a run that runs, restarts and goodput."""
    config = next((record["config"] for record in reversed(records) if record["kind"] == "run"), {})
    step = max((record["step"] for record in records), default=0)
    num_steps = config.get("num_steps", step)
    parts = [f"{run_dir}: step {step:,} of {num_steps:,}"]
    if any(record["kind"] == "summary" and record["step"] == step for record in records[-1:]):
        parts.append("ended")
    elif not is_held(run_dir):
        parts.append("not running")
    elif step < num_steps and train and "step_s" in train[-1]:
        parts.append(f"{timedelta(seconds=round((num_steps - step) * train[-1]['step_s']))} left")
    if count := restarts(records):
        parts.append(FORMATS["restarts"].format(count))
    ended = next((record.get("goodput") for record in records[-1:] if record["kind"] == "summary"), None)
    if fraction := ended or goodput(records, datetime.now(UTC)):
        parts.append(FORMATS["goodput"].format(fraction))
    return ", ".join(parts)


def _checkpoint(run_dir: Path) -> str:
    """The last checkpoint, and its age."""
    found = steps(run_dir / FOLDER)
    if not found:
        return "no checkpoint yet"
    age_s = time.time() - (run_dir / FOLDER / str(found[-1])).stat().st_mtime
    return f"last checkpoint: step {found[-1]:,}, {timedelta(seconds=round(age_s))} ago"


def _table(positions: Mapping[int, Position], slow: int | None) -> Table:
    table = Table("process", "step", "phase", "for", "", box=None, pad_edge=False)
    for index, position in positions.items():
        note = "the others wait for it" if index == slow else ""
        table.add_row(str(index), f"{position.step:,}", position.phase, f"{position.age_s:.1f} s", note)
    return table
