"""What the evaluation of a run measures beside its loss, and what it cannot count."""

from __future__ import annotations

from typing import Any

from meshpar.data.rows.dataset import RowDataset, StreamDataset
from meshpar.data.rows.spec import COUNTED
from meshpar.errors import DataError
from meshpar.experiment.config import Run
from meshpar.experiment.prepare import Prepared
from meshpar.train.evaluate import LazyEvaluation, reads
from meshpar.train.tasks import NamedLoss
from meshpar.train.tasks.metrics import Measure


def check_short_batch(run: Run, held_out: Any, evaluate: LazyEvaluation) -> None:
    """Refuses a short last batch of an evaluation, and corrupt rows, if the loss would count the rows that fill them.

    Raises:
      DataError: the user's own loss does not read `counted`.
    """
    if isinstance(run.loss, NamedLoss) or not isinstance(held_out, (RowDataset, StreamDataset)):
        return
    size = run.data.batch_size
    num_rows = held_out.num_rows if isinstance(held_out, RowDataset) else None
    if held_out.skipped is not None and not reads(evaluate, COUNTED):
        what = "data.skip_corrupt = true: the rows that are left out do not count"
        fix = "LossSums((losses * batch['counted']).sum(), batch['counted'].sum())"
        raise DataError(f"{run.loss.target}: {what}, and this loss does not read batch['counted']; return {fix}")
    if (num_rows is None or num_rows % size) and not reads(evaluate, COUNTED):
        held = "a stream of held-out rows" if num_rows is None else f"{num_rows} held-out rows"
        what = f"{held} may end in a batch of fewer than {size} rows, which rows that do not count fill"
        fix = "LossSums((losses * batch['counted']).sum(), batch['counted'].sum())"
        whole = f", or data.held_out_rows={num_rows // size * size}" if num_rows and num_rows >= size else ""
        name = run.loss.target
        raise DataError(f"{name}: {what}, and this loss does not read batch['counted']; return {fix}{whole}")


def measure_of(prepared: Prepared) -> Measure | None:
    """The metrics of a loss by name that are no means over batches."""
    loss = prepared.run.loss
    if not isinstance(loss, NamedLoss):
        return None
    return Measure(prepared.lazy_row_results(), loss.row_metrics, loss.of_means)
