"""What a run says of itself: a line of JSON a logged step, TensorBoard, a progress bar.

MFU, by its one convention here: the operations that the model needs over those that the chips could do. A token
needs 6 operations for each parameter that it is multiplied with (2 forward, 4 backward), and for attention,
in each layer, 6 x seq_len x num_heads x head_dim: 12, halved because a causal model needs half of the scores.
Recomputation does not count.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from meshpar.errors import CheckpointError

Record = dict[str, float | int | str]
FILE = "metrics.jsonl"


def flops_per_token(matmul_params: int, num_layers: int, seq_len: int, attention_width: int) -> int:
    """Operations that a token needs, forward and backward.

    Args:
      matmul_params: parameters that a token is multiplied with: not the embedding table, unless it is tied.
      attention_width: num_heads x head_dim.

    >>> flops_per_token(100, 2, 10, 4)
    1080
    """
    return 6 * matmul_params + 6 * num_layers * seq_len * attention_width


@dataclass
class Recorder:
    """Writes records where they are wanted; `recorder` opens one.

    Args:
      file: gets each record as a line of JSON, at once.
      board: a TensorBoard writer.
      show: shows a record to a person, or to a program.
    """

    file: TextIO
    board: Any
    show: Callable[[Record], None]

    def begin(self, step: int, config: dict[str, Any]) -> None:
        """Records the config with which a run begins, or goes on, at a step."""
        self._write({"kind": "run", "step": step, "config": config})

    def record(self, kind: str, step: int, **values: float | int) -> None:
        """Records numbers under a kind: `train`, `evaluation`, `summary`."""
        self._write({"kind": kind, "step": step, **values})
        for name, value in values.items():
            self.board.add_scalar(f"{kind}/{name}", value, step)
        self.show({"kind": kind, "step": step, **values})

    def summarize(self, step: int) -> None:
        """Records the loss on held-out data beside the very first step's, which an earlier process may have seen."""
        self.file.flush()
        records = [json.loads(line) for line in Path(self.file.name).read_text().splitlines()]
        first = next(record["loss"] for record in records if record["kind"] == "train")
        held_out = next(record["loss"] for record in reversed(records) if record["kind"] == "evaluation")
        self.record("summary", step, first_loss=first, held_out_loss=held_out, lower_by=1 - held_out / first)

    def _write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()


@contextmanager
def recorder(run_dir: Path, num_steps: int, as_json: bool = False) -> Iterator[Recorder]:
    """A recorder into `run_dir/metrics.jsonl` and `run_dir/tensorboard`.

    A run that is resumed appends: of two lines of one step, the later counts.
    """
    from tensorboardX import SummaryWriter

    with ExitStack() as stack:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((run_dir / FILE).open("a"))
        except OSError as error:
            raise CheckpointError(f"run_dir: {run_dir} cannot be written: {error.strerror}") from None
        board = SummaryWriter(str(run_dir / "tensorboard"))
        stack.callback(board.close)
        show = _print_json if as_json else stack.enter_context(_shown_to_people(num_steps))
        yield Recorder(file, board, show)


def _print_json(record: Record) -> None:
    print(json.dumps(record), flush=True)


@contextmanager
def _shown_to_people(num_steps: int) -> Iterator[Any]:
    """A progress bar on a terminal; elsewhere a line a record."""
    if not sys.stdout.isatty():
        yield lambda record: print(_line(record), flush=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns) as progress:
        task = progress.add_task("compiling", total=num_steps)

        def show(record: Record) -> None:
            if record["kind"] == "train":
                progress.update(task, completed=int(record["step"]), description=_numbers(record))
            else:
                progress.console.print(_line(record))

        yield show


def _line(record: Record) -> str:
    return f"{record['kind']:<10} step {record['step']:>6}  {_numbers(record)}"


_FORMATS = {
    "loss": "loss {:.4f}",
    "first_loss": "first loss {:.4f}",
    "held_out_loss": "held-out loss {:.4f}",
    "lower_by": "lower by {:.0%}",
    "grad_norm": "norm {:.2f}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "step_s": "{:.3f} s/step",
    "mfu": "MFU {:.1%}",
    "lr": "lr {:.1e}",
}


def _numbers(record: Record) -> str:
    shown = [form.format(record[name]) for name, form in _FORMATS.items() if name in record]
    skipped = record.get("skipped", 0)
    return "  ".join([*shown, f"{skipped} steps skipped: not finite"] if skipped else shown)
