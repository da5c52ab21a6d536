"""Serves a run's numbers to Prometheus. Only this module imports its client library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from meshpar.errors import ConfigError
from meshpar.records.file import FILE, read
from meshpar.records.goodput import goodput, restarts

if TYPE_CHECKING:
    from meshpar.records.loggers import Record, Sink

GAUGES = {
    ("train", "loss"): ("loss", "Loss of the last logged step."),
    ("train", "tokens_per_s"): ("tokens_per_second", "Tokens that all devices train on in a second."),
    ("train", "rows_per_s"): ("rows_per_second", "Rows of arrays that all devices train on in a second."),
    ("train", "step_s"): ("step_seconds", "Mean seconds of the steps since the last log."),
    ("train", "data_wait"): ("data_wait_ratio", "Fraction of the time in which steps waited for data."),
    ("train", "mfu"): ("mfu_ratio", "Model FLOPs utilization."),
    ("train", "skipped"): ("skipped_steps", "Steps skipped so far, because they were not finite."),
    ("evaluation", "loss"): ("held_out_loss", "Loss of the last evaluation."),
    ("checkpoint", "blocked_s"): ("checkpoint_seconds", "Seconds for which the last checkpoint held up the steps."),
}
"""Kind and name of a recorded number -> name and meaning of its metric, `meshpar_NAME`."""


@contextmanager
def serving(run_dir: Path, host: str, port: int) -> Iterator[Sink]:
    """Serves metrics over HTTP, with restarts and goodput of the whole run. Yields a function that adds a record.

    Raises:
      ConfigError: the client library is not installed, or nothing can listen at the address.
    """
    try:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server
    except ImportError:
        message = "loggers: prometheus_client is not installed; pip install 'meshpar[metrics]', or leave it out"
        raise ConfigError(message) from None
    registry = CollectorRegistry()

    def gauge(name: str, meaning: str) -> Gauge:
        return Gauge(f"meshpar_{name}", meaning, registry=registry)

    gauges = {key: gauge(*metric) for key, metric in GAUGES.items()}
    step = gauge("step", "The last logged step.")
    began = gauge("restarts", "How many times the run began again.")
    records: list[Record] = []
    progress = gauge("goodput_ratio", "Fraction of the time since the run began in which it made progress.")
    progress.set_function(lambda: goodput(records, datetime.now(UTC)) or 0.0)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        what = f"--metrics-port: nothing can listen at {host}:{port}: {error.strerror}"
        raise ConfigError(f"{what}; choose another port") from None

    def show(record: Record) -> None:
        if record["kind"] == "run":  # it has already been written
            records[:] = [earlier for earlier in read(run_dir / FILE) if earlier["kind"] in ("run", "train")]
            began.set(restarts(records))
        elif record["kind"] == "train":
            records.append(record)
        step.set(record["step"])
        for (kind, name), metric in gauges.items():
            if kind == record["kind"] and name in record:
                metric.set(record[name])

    try:
        yield show
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
