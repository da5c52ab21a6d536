"""What a run says of itself: a line of JSON a logged step, loggers, a progress bar.

MFU, by its one convention here: the operations that the model needs over those that the chips could do. What it needs
is `Training.model_flops`. Of a decoder, a token needs 6 operations for each parameter that it is multiplied with (2
forward, 4 backward), and for attention, in each layer, 6 x seq_len x num_heads x head_dim: 12, halved because a causal
model needs half of the scores. Recomputation does not count.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from statistics import median
from typing import Any

import jax

from meshpar.errors import CheckpointError, Problems
from meshpar.progress import say
from meshpar.train.records.loggers import Logger, Record, Sink, TensorBoard
from meshpar.train.records.writing import writing
from meshpar.tree import shortened

FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Recorder:
    """Hands each record to those who want it; `recorder` opens one.

    Args:
      file: where the records can be read again.
      sinks: none of them on any process but the first.
    """

    file: Path
    sinks: Sequence[Sink]

    def check(self) -> None:
        """Raises RunError if the run directory was moved or removed: what is written to an open file would be lost."""
        with writing("a record", self.file):
            os.stat(self.file)

    def begin(self, step: int, config: dict[str, Any]) -> None:
        """Records the config with which a run begins, or goes on from a checkpoint of `step`."""
        self.record("run", step, config=config)

    def record(self, kind: str, step: int, **values: Any) -> None:
        """Records what belongs to a step, under a kind: `train`, `evaluation`, `summary`.

        Raises:
          RunError: it cannot be written.
        """
        for sink in self.sinks:
            sink({"kind": kind, "step": step, **values})

    def summarize(self, step: int) -> None:
        """Records `summary` of the whole run, of which earlier processes may have made a part."""
        if self.sinks:
            self.record("summary", step, **summary(read(self.file)))


@contextmanager
def recorder(
    run_dir: Path, num_steps: int, as_json: bool = False, loggers: Sequence[Logger] = (TensorBoard(),)
) -> Iterator[Recorder]:
    """A recorder into `run_dir/metrics.jsonl`, to the loggers, and onto standard output.

    Args:
      num_steps: the length of the progress bar.
      as_json: print records as lines of JSON, and nothing else.

    Raises:
      CheckpointError: the run directory cannot be written, or what earlier processes recorded cannot be read.
      ConfigError: see `Logger.open`.
    """
    file = run_dir / FILE
    with ExitStack() as stack:
        sinks: list[Sink] = []
        if jax.process_index() == 0:
            sinks.append(stack.enter_context(_into(file)))
            sinks += [stack.enter_context(logger.open(run_dir)) for logger in loggers]
            sinks.append(_print_json if as_json else stack.enter_context(_shown_to_people(num_steps)))
        yield Recorder(file, sinks)


def evaluations(file: Path, until: int) -> list[Record]:
    """What was recorded of evaluations up to a step; nothing of a run that has no records yet."""
    records = read(file) if file.exists() else []
    return [record for record in records if record["kind"] == "evaluation" and record["step"] <= until]


def read(file: Path, problems: Problems | None = None) -> list[Record]:
    """The records of a run, in order of steps.

    The file is only ever appended to. What an interrupted process recorded beyond the checkpoint from which the next
    went on stays in it, and is left out here: those steps were taken again. So is a last line that breaks off: its
    process was killed while it wrote.

    Args:
      problems: gets each other line that is no record; without it, such lines raise.

    Raises:
      CheckpointError: lists them.
    """
    records: list[Record] = []
    for record in _records(file.read_bytes(), file, problems):
        if record["kind"] == "run":
            records = [earlier for earlier in records if earlier["step"] <= record["step"]]
        records.append(record)
    return records


def _records(text: bytes, file: Path, told: Problems | None = None) -> list[Record]:
    """The records of each line, in their order."""
    problems = Problems() if told is None else told
    found: list[Record] = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        record = _parsed(line)
        if record is not None:
            found.append(record)
        elif line.endswith(b"\n"):
            problems.add(f"{file}:{number}", "is no record of a run", "remove this line: no other needs it")
    if told is None:
        problems.raise_any(CheckpointError, "what was recorded cannot be read:")
    return found


def _parsed(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and "kind" in record and isinstance(record.get("step"), int)
    return record if is_record else None


def summary(records: Sequence[Record]) -> Record:
    """What it came to: first and last losses, the median speed, and how many steps were skipped, if any were.

    What was never recorded is left out. A last loss that is not finite is not a number here.

    >>> steps = [{"kind": "train", "step": 1, "loss": 4.0}, {"kind": "train", "step": 2, "loss": 3.0, "step_s": 0.5}]
    >>> summary([*steps, {"kind": "evaluation", "step": 2, "loss": 3.0}])
    {'first_loss': 4.0, 'last_loss': 3.0, 'held_out_loss': 3.0, 'lower_by': 0.25, 'step_s': 0.5}
    """
    losses = _column(records, "train", "loss")
    told: Record = {
        "first_loss": losses[0] if losses else None,
        "last_loss": _last(records, "train", "loss"),
        "held_out_loss": _last(records, "evaluation", "loss"),
    }
    if losses and told["held_out_loss"] is not None:
        told["lower_by"] = 1 - told["held_out_loss"] / losses[0]
    for name in ("step_s", "tokens_per_s", "data_wait", "mfu"):
        values = _column(records, "train", name)
        told[name] = median(values) if values else None
    told["skipped"] = _last(records, "train", "skipped") or None
    return {name: value for name, value in told.items() if value is not None}


def _column(records: Sequence[Record], kind: str, name: str) -> list[float]:
    return [r[name] for r in records if r["kind"] == kind and r.get(name) is not None]


def _last(records: Sequence[Record], kind: str, name: str) -> float | None:
    """The value of the last such record, a NaN where it was not finite; None if there is none."""
    values = [r[name] for r in records if r["kind"] == kind and name in r]
    if not values:
        return None
    return math.nan if values[-1] is None else values[-1]


@contextmanager
def _into(file: Path) -> Iterator[Sink]:
    """Appends each record at once: a run that is killed has said what it did."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.open("ab", buffering=0)
    except OSError as error:
        raise CheckpointError(f"run_dir: {file.parent} cannot be written: {error.strerror}") from None
    with lines:
        _end_last_line(file, lines)
        yield partial(_append, file, lines)


def _end_last_line(file: Path, lines: FileIO) -> None:
    """A process that was killed while it wrote, or met a full disk, may have left half a line, which is cut off."""
    text = file.read_bytes()
    _records(text, file)
    last = text.rpartition(b"\n")[2]
    if last and _parsed(last) is not None:
        lines.write(b"\n")
    elif last:
        lines.truncate(len(text) - len(last))
        say(f"meshpar: {file}: its last line was not finished and is cut off: {len(last)} bytes")


def _append(file: Path, lines: FileIO, record: Record) -> None:
    """Writes one line, or nothing."""
    line = (_json(record) + "\n").encode()
    with writing("a record", file):
        os.stat(file)
        size = os.fstat(lines.fileno()).st_size
        try:
            while line:
                line = line[lines.write(line) :]
        except OSError:
            lines.truncate(size)
            raise


def _print_json(record: Record) -> None:
    print(_json(record), flush=True)


def _json(record: Record) -> str:
    """One line. JSON has no NaN: a number that is not finite becomes null."""
    return json.dumps({name: None if _is_not_finite(value) else value for name, value in record.items()})


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


@contextmanager
def _shown_to_people(num_steps: int) -> Iterator[Sink]:
    """A progress bar on a terminal; elsewhere a line a record."""
    if not sys.stdout.isatty():
        yield lambda record: print(_line(record), flush=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(8), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    progress = Progress(*columns)
    task = progress.add_task("", total=num_steps)

    def show(record: Record) -> None:
        if record["kind"] == "run":  # until then the terminal belongs to what shows that JAX compiles
            progress.start()
        progress.update(task, completed=record["step"])
        if record["kind"] == "train":
            short = {name: value for name, value in record.items() if name in _BESIDE_THE_BAR}
            progress.update(task, description=_numbers(short))
        else:
            progress.console.print(_line(record), highlight=False, soft_wrap=True)

    try:
        yield show
    finally:
        progress.stop()


def _line(record: Record) -> str:
    return f"{record['kind']:<10} step {record['step']:>6}  {_numbers(record)}"


_FORMATS = {
    "loss": "loss {:.4f}",
    "first_loss": "first loss {:.4f}",
    "last_loss": "last loss {:.4f}",
    "held_out_loss": "held-out loss {:.4f}",
    "lower_by": "lower by {:.0%}",
    "grad_norm": "norm {:.2f}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "step_s": "{:.3f} s/step",
    "data_wait": "waits for data {:.1%}",
    "mfu": "MFU {:.1%}",
    "lr": "lr {:.1e}",
}
_BESIDE_THE_BAR = ("kind", "loss", "tokens_per_s", "step_s", "mfu", "skipped")  # what a line of 80 columns has room for


def _numbers(record: Record) -> str:
    if record["kind"] == "restored":
        return _restored(record)
    if record["kind"] == "run":
        return "goes on from a checkpoint" if record["step"] else "begins"
    if "why" in record:
        return record["why"]
    shown = [form.format(record[name]) for name, form in _FORMATS.items() if name in record]
    if record["kind"] == "evaluation":  # what the loss and callbacks say besides
        others = record.keys() - _FORMATS.keys() - {"kind", "step", "tokens"}
        shown += [f"{name.replace('_', ' ')} {record[name]:.4g}" for name in record if name in others]
    if record.get("skipped"):
        shown.append(f"skipped so far, as not finite: {record['skipped']}")
    return "  ".join(shown)


def _restored(record: Record) -> str:
    taken, made, unused = record["taken"], record["made"], record["unused"]
    parts = [f"takes {_arrays(taken, [*made, *unused])} of {record['source']}"]
    parts += [f"makes {_arrays(made, taken)}"] * bool(made) + [f"does not use {_arrays(unused, taken)}"] * bool(unused)
    parts += [f"{key} was {old}, is {new}" for key, (old, new) in record["changed"].items()]
    return "; ".join(parts)


def _arrays(paths: Sequence[str], others: Sequence[str]) -> str:
    """How many and which, as globs."""
    if not others:
        return f"all {len(paths)} arrays"
    return f"{len(paths)} array{'s' * (len(paths) != 1)} ({', '.join(shortened(paths, [*paths, *others]))})"
