"""Reads and writes the file of a run's records, which has a JSON object per line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from meshpar.errors import CheckpointError, Problems
from meshpar.progress import say
from meshpar.records.writing import writing

if TYPE_CHECKING:
    from meshpar.records.loggers import Record, Sink

FILE = "metrics.jsonl"


def read(file: Path, problems: Problems | None = None) -> list[Record]:
    """The records of a run, in order of steps.

    A run only appends to the file. A resumed run repeats the steps after its checkpoint, so the earlier records of
    these steps are excluded. So is an unfinished last line, which a process leaves that is killed while it writes.

    Args:
      problems: every other line that is not a record is added; without it such lines raise.

    Raises:
      CheckpointError: lists the lines that are not records.
    """
    records: list[Record] = []
    for record in _records(file.read_bytes(), file, problems):
        if record["kind"] == "run":
            records = [earlier for earlier in records if earlier["step"] <= record["step"]]
        records.append(record)
    return records


def evaluations(file: Path, until: int) -> list[Record]:
    """The records of evaluations up to a step; none if there is no file yet."""
    records = read(file) if file.exists() else []
    return [record for record in records if record["kind"] == "evaluation" and record["step"] <= until]


def series(records: Sequence[Record], kind: str, name: str) -> tuple[list[int], list[float]]:
    """Steps and values, without values that were not finite, which are recorded as null."""
    points = [(r["step"], r[name]) for r in records if r["kind"] == kind and r.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


@contextmanager
def appending(file: Path) -> Iterator[Sink]:
    """Yields a function that appends a record. Each is written at once, so that a killed run loses none.

    Raises:
      CheckpointError: the folder cannot be written, or the file has lines that are not records.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.open("ab", buffering=0)
    except OSError as error:
        raise CheckpointError(f"run_dir: {file.parent} cannot be written: {error.strerror}") from None
    with lines:
        _end_last_line(file, lines)
        yield partial(append, file, lines)


def append(file: Path, lines: FileIO, record: Record) -> None:
    """Writes one whole line, or nothing.

    Raises:
      RunError: it cannot be written, or the file was moved or removed.
    """
    line = (as_json(record) + "\n").encode()
    with writing("a record", file):
        os.stat(file)
        size = os.fstat(lines.fileno()).st_size
        try:
            while line:
                line = line[lines.write(line) :]
        except OSError:
            lines.truncate(size)
            raise


def as_json(record: Record) -> str:
    """One line. JSON has no NaN: a number that is not finite becomes null."""
    bad = {name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps(record | dict.fromkeys(bad))


def _end_last_line(file: Path, lines: FileIO) -> None:
    """Cuts off an unfinished last line, which a process leaves if it is killed, or if the disk is full."""
    text = file.read_bytes()
    _records(text, file)
    last = text.rpartition(b"\n")[2]
    if last and _parsed(last) is not None:
        lines.write(b"\n")
    elif last:
        lines.truncate(len(text) - len(last))
        say(f"meshpar: {file}: its last line was not finished and is cut off: {len(last)} bytes")


def _records(text: bytes, file: Path, problems: Problems | None = None) -> list[Record]:
    """The records of all lines, in their order."""
    bad = Problems() if problems is None else problems
    found: list[Record] = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        record = _parsed(line)
        if record is not None:
            found.append(record)
        elif line.endswith(b"\n"):
            bad.add(f"{file}:{number}", "is no record of a run", "remove this line: no other line depends on it")
    if problems is None:
        bad.raise_any(CheckpointError, "the records of the run cannot be read:")
    return found


def _parsed(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and "kind" in record and isinstance(record.get("step"), int)
    return record if is_record else None
