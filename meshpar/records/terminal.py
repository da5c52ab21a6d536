"""Shows records on standard output: as a progress bar on a terminal, elsewhere as lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from meshpar.errors import printable
from meshpar.records.file import as_json
from meshpar.records.loggers import Record, Sink
from meshpar.tree import shortened

FORMATS = {
    "loss": "loss {:.4f}",
    "first_loss": "first loss {:.4f}",
    "last_loss": "last loss {:.4f}",
    "held_out_loss": "held-out loss {:.4f}",
    "lower_by": "lower by {:.0%}",
    "grad_norm": "norm {:.2f}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "rows_per_s": "{:,.0f} rows/s",
    "step_s": "{:.3f} s/step",
    "data_wait": "waits for data {:.1%}",
    "rows_skipped": "{:,} corrupt rows skipped",
    "mfu": "MFU {:.1%}",
    "lr": "lr {:.1e}",
    "restarts": "{} restarts",
    "goodput": "goodput {:.1%}",
}
BAR_NAMES = ("kind", "loss", "tokens_per_s", "rows_per_s", "step_s", "mfu", "skipped")  # they fit into 80 columns


HIDDEN = ("checkpoint", "copy")
"""The kinds of records that only files and services receive."""


@contextmanager
def shown(num_steps: int) -> Iterator[Sink]:
    """Yields a function that shows a record."""
    if not sys.stdout.isatty():
        yield lambda record: None if record["kind"] in HIDDEN else print(_line(record), flush=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(8),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    progress = Progress(*columns)
    task = progress.add_task("", total=num_steps)

    def show(record: Record) -> None:
        if record["kind"] == "run":  # before that, another display shows that JAX compiles
            progress.start()
        progress.update(task, completed=record["step"])
        if record["kind"] == "train":
            short = {name: value for name, value in record.items() if name in BAR_NAMES}
            progress.update(task, description=_text(short))
        elif record["kind"] not in HIDDEN:
            progress.console.print(_line(record), highlight=False, markup=False, soft_wrap=True)

    try:
        yield show
    finally:
        progress.stop()


def shown_as_json(record: Record) -> None:
    """Prints a record as a line of JSON."""
    print(as_json(record), flush=True)


def _line(record: Record) -> str:
    return printable(f"{record['kind']:<10} step {record['step']:>6}  {_text(record)}")


def _text(record: Record) -> str:
    """The text that is shown after the kind and the step of a record."""
    if record["kind"] == "restored":
        return _restored(record)
    if record["kind"] == "run":
        return "resumes from a checkpoint" if record["step"] else "begins"
    if "why" in record:
        return record["why"]
    parts = [form.format(record[name]) for name, form in FORMATS.items() if name in record]
    if record["kind"] == "evaluation":  # further metrics of the loss and of callbacks
        others = record.keys() - FORMATS.keys() - {"kind", "step", "tokens"}
        parts += [f"{name.replace('_', ' ')} {record[name]:.4g}" for name in record if name in others]
    if record.get("skipped"):
        parts.append(f"skipped so far, as not finite: {record['skipped']}")
    return "  ".join(parts)


def _restored(record: Record) -> str:
    restored, initialized, ignored = (record[name] for name in ("restored", "initialized", "ignored"))
    parts = [f"restores {_arrays(restored, [*initialized, *ignored])} of {record['source']}"]
    if initialized:
        parts.append(f"initializes {_arrays(initialized, restored)}")
    if ignored:
        parts.append(f"ignores {_arrays(ignored, restored)}")
    parts += [f"{key} was {old}, is {new}" for key, (old, new) in record["changed"].items()]
    return "; ".join(parts)


def _arrays(paths: Sequence[str], others: Sequence[str]) -> str:
    """The number of arrays, and globs that match them and none of the others."""
    if not others:
        return f"all {len(paths)} arrays"
    noun = "array" if len(paths) == 1 else "arrays"
    return f"{len(paths)} {noun} ({', '.join(shortened(paths, [*paths, *others]))})"
