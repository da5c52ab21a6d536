"""Records the metrics of a run: in a file, with loggers, and on standard output.

MFU (model FLOPs utilization) is the FLOPs that the model needs, `Training.model_flops`, over the peak FLOPs of the
chips. Per token, a decoder needs 6 FLOPs for each parameter that the token is multiplied by (2 forward, 4 backward),
and for attention 6 x seq_len x num_heads x head_dim FLOPs in each layer: half of 12, because a causal model needs half
of the scores. Scores beyond a window that all layers have, and recomputation, do not count.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import jax

from meshpar.records.file import FILE, appending, read, series
from meshpar.records.goodput import goodput, restarts
from meshpar.records.loggers import Logger, Record, Sink, TensorBoard
from meshpar.records.terminal import shown, shown_as_json
from meshpar.records.writing import writing


@dataclass(frozen=True)
class Recorder:
    """Passes each record to its sinks; `recorder` opens one.

    Args:
      file: where the records can be read.
      sinks: functions of a record; none except in the first process.
      began: when this process began the run, in ISO 8601.
    """

    file: Path
    sinks: Sequence[Sink]
    began: str = field(default_factory=lambda: datetime.now(UTC).isoformat())

    def check(self) -> None:
        """Raises RunError if the run directory was moved or removed: writes to the open file would be lost."""
        with writing("a record", self.file):
            os.stat(self.file)

    def begin(self, step: int, config: dict[str, Any]) -> None:
        """Records the config of a run that starts, or that resumes from the checkpoint of `step`."""
        self.record("run", step, config=config, began=self.began)

    def record(self, kind: str, step: int, **values: Any) -> None:
        """Records the values of a step, under a kind such as `train`, `evaluation`, `summary`.

        Raises:
          RunError: the record cannot be written.
        """
        for sink in self.sinks:
            sink({"kind": kind, "step": step, **values})

    def summarize(self, step: int) -> None:
        """Records the `summary` and the goodput of the whole run, including the parts of earlier processes."""
        if self.sinks:
            records = read(self.file)
            whole = {"restarts": restarts(records) or None, "goodput": goodput(records, datetime.now(UTC))}
            repeated = [record for record in records if record["kind"] == "summary" and record["step"] == step]
            if repeated:  # the run had ended already
                whole = {name: repeated[-1].get(name) for name in whole}
            known = {name: value for name, value in whole.items() if value is not None}
            self.record("summary", step, **summary(records), **known)


@contextmanager
def recorder(
    run_dir: Path, num_steps: int, as_json: bool = False, loggers: Sequence[Logger] = (TensorBoard(),)
) -> Iterator[Recorder]:
    """Opens a recorder into `run_dir/metrics.jsonl`, the loggers and standard output.

    Args:
      num_steps: length of the progress bar.
      as_json: print only the records, as lines of JSON.

    Raises:
      CheckpointError: the run directory cannot be written, or its earlier records cannot be read.
      ConfigError: see `Logger.open`.
    """
    file = run_dir / FILE
    with ExitStack() as stack:
        sinks: list[Sink] = []
        if jax.process_index() == 0:
            sinks.append(stack.enter_context(appending(file)))
            sinks += [stack.enter_context(logger.open(run_dir)) for logger in loggers]
            sinks.append(shown_as_json if as_json else stack.enter_context(shown(num_steps)))
        yield Recorder(file, sinks)


_MOST_TIMES = 10


def summary(records: Sequence[Record]) -> Record:
    """First and last losses, the median speed, and the number of skipped steps if it is not zero.

    Values that were never recorded are excluded. A last loss that is not finite is NaN. `lower_by` is a share of the
    first loss, so that it is left out where that is not positive, or tiny beside the last: rewards begin at 0.

    >>> steps = [{"kind": "train", "step": 1, "loss": 4.0}, {"kind": "train", "step": 2, "loss": 3.0, "step_s": 0.5}]
    >>> summary([*steps, {"kind": "evaluation", "step": 2, "loss": 3.0}])
    {'first_loss': 4.0, 'last_loss': 3.0, 'held_out_loss': 3.0, 'lower_by': 0.25, 'step_s': 0.5}
    """
    _, losses = series(records, "train", "loss")
    found: Record = {
        "first_loss": losses[0] if losses else None,
        "last_loss": _last(records, "train", "loss"),
        "held_out_loss": _last(records, "evaluation", "loss"),
    }
    if losses and (held_out := found["held_out_loss"]) is not None and not losses[0] <= abs(held_out) / _MOST_TIMES:
        found["lower_by"] = 1 - held_out / losses[0]
    for name in ("step_s", "tokens_per_s", "rows_per_s", "data_wait", "mfu"):
        _, values = series(records, "train", name)
        found[name] = median(values) if values else None
    found["skipped"] = _last(records, "train", "skipped") or None
    return {name: value for name, value in found.items() if value is not None}


def _last(records: Sequence[Record], kind: str, name: str) -> float | None:
    """The last value, NaN if it was not finite; None if there is none."""
    values = [r[name] for r in records if r["kind"] == kind and name in r]
    if not values:
        return None
    return math.nan if values[-1] is None else values[-1]
