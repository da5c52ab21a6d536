"""What an evaluation of a run records, known before anything is trained."""

from __future__ import annotations

from meshpar.errors import ConfigError, suggestion
from meshpar.experiment.prepare import Prepared
from meshpar.train.tasks.base import NamedLoss


def metrics(prepared: Prepared) -> set[str]:
    """The metrics of an evaluation, without those of callbacks. Traces the evaluation, and compiles nothing."""
    found = {*prepared.lazy_evaluation().traced.out_info} - {"tokens"}
    loss = prepared.run.loss
    if isinstance(loss, NamedLoss):
        found |= {*loss.row_metrics, *loss.of_means(dict.fromkeys(found, 1.0))}
    return found


def check(metric: str, prepared: Prepared) -> None:
    """Refuses a metric that no evaluation of the run would record. A run with callbacks may record any.

    Raises:
      ConfigError: names the metrics that there are.
    """
    if metric == "loss" or prepared.run.callbacks:  # each run has the loss
        return
    if metric not in (names := metrics(prepared)):
        fix = suggestion(metric, names, f"there are {', '.join(sorted(names))}")
        raise ConfigError(f"--metric {metric}: no evaluation would record it; {fix}")
