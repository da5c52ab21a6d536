"""Sends a run's records from the first process to services: TensorBoard, Weights & Biases, MLflow, Prometheus."""

from __future__ import annotations

import importlib
import math
import os
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from meshpar.config import Config
from meshpar.errors import ConfigError
from meshpar.import_blocker import blocked
from meshpar.records.prometheus import serving
from meshpar.records.writing import writing
from meshpar.tree import flatten_with_paths

FLUSH_S = 30.0

Record = dict[str, Any]
"""`kind`, `step`, and the recorded numbers and texts; a record of the kind `run` holds the config."""
Sink = Callable[[Record], None]


class _Logger(Config):
    """In a config a bare kind selects the defaults: `loggers: [tensorboard, {kind: wandb, mode: offline}]`."""

    shorthand: ClassVar = "kind"

    @abstractmethod
    def open(self, run_dir: Path) -> AbstractContextManager[Sink]:
        """A context that yields a function of a record. A run that resumes continues the same run of the service.

        Raises:
          ConfigError: the package is not installed, or cannot start.
        """


class TensorBoard(_Logger):
    """Event files in `run_dir/tensorboard`."""

    kind: Literal["tensorboard"] = "tensorboard"

    @contextmanager
    def open(self, run_dir: Path) -> Iterator[Sink]:
        with ExitStack() as stack:
            events: EventsFile | None = None

            def write(record: Record) -> None:
                nonlocal events
                if record["kind"] == "run":
                    events = stack.enter_context(closing(EventsFile(run_dir / "tensorboard", record["step"])))
                if events and (values := numbers(record)):
                    events.write(values, record["step"])

            yield write


class EventsFile:
    """A file of TensorBoard events, written in the caller's thread, so that errors of the disk reach the caller.

    Args:
      step: the step from which the run starts or resumes: TensorBoard hides the earlier records of later steps.
    """

    def __init__(self, folder: Path, step: int):
        with blocked("torch"):  # tensorboardX would import it for a second, for tensors that are not used
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import SessionLog  # pyright: ignore

        self._folder = folder
        self._flushed_at: float | None = None
        with self._writing():
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"))
        self._add(step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, values: dict[str, float], step: int) -> None:
        from tensorboardX.summary import scalar

        for name, value in values.items():
            self._add(step, summary=scalar(name, value))
        now = time.monotonic()
        if self._flushed_at is None or now - self._flushed_at >= FLUSH_S:
            with self._writing():
                self._writer.flush()
            self._flushed_at = now

    def close(self) -> None:
        try:
            with self._writing():
                self._writer.flush()
        finally:
            with suppress(OSError):  # the same error again
                self._writer._py_recordio_writer.close()

    def _add(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore

        with self._writing():
            self._writer.write_event(Event(wall_time=time.time(), step=step, **content))

    def _writing(self) -> AbstractContextManager[None]:
        return writing("TensorBoard's events", self._folder)


class WandB(_Logger):
    """Weights & Biases. If a resumed run repeats steps, it keeps their first records. Extra: `meshpar[wandb]`."""

    kind: Literal["wandb"] = "wandb"
    project: str = "meshpar"
    """Name of the project."""
    name: str | None = None
    """Name of the run; default: that of the run directory."""
    mode: Literal["online", "offline"] = "online"
    """`offline` sends nothing: it writes to `run_dir/wandb`, for `wandb sync`."""

    @contextmanager
    def open(self, run_dir: Path) -> Iterator[Sink]:
        wandb = _extra("wandb")
        with ExitStack() as stack:
            run: Any = None

            def begin(config: dict[str, Any]) -> None:
                nonlocal run
                run_id = _stored(run_dir / "wandb.id", lambda: f"{time.time_ns():x}")
                opened = wandb.init(
                    project=self.project, name=self.name or run_dir.name, dir=str(run_dir.absolute()),
                    mode=self.mode, config=config, id=run_id, resume="allow" if self.mode == "online" else None,
                )  # fmt: skip
                run = stack.enter_context(opened)

            yield _guarded("wandb", begin, lambda record: run.log(numbers(record), step=record["step"]))


class MLflow(_Logger):
    """MLflow. Extra: `meshpar[mlflow]`."""

    kind: Literal["mlflow"] = "mlflow"
    experiment: str = "meshpar"
    """Name of the experiment."""
    name: str | None = None
    """Name of the run; default: that of the run directory."""
    tracking_uri: str | None = None
    """A server or a database. Default: `MLFLOW_TRACKING_URI`, or else the file `run_dir/mlflow.db`."""

    @contextmanager
    def open(self, run_dir: Path) -> Iterator[Sink]:
        mlflow = _extra("mlflow")
        client: Any = None
        run_id = ""
        status = "FAILED"

        def begin(config: dict[str, Any]) -> None:
            nonlocal client, run_id
            database = f"sqlite:///{run_dir.absolute() / 'mlflow.db'}"
            client = mlflow.MlflowClient(self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or database)
            run_id = _stored(run_dir / "mlflow.id", lambda: self._create(mlflow, client, run_dir, config))
            client.update_run(run_id, status="RUNNING")

        def log(record: Record) -> None:
            now = int(1000 * time.time())
            values = numbers(record).items()
            metrics = [mlflow.entities.Metric(name, float(value), now, record["step"]) for name, value in values]
            client.log_batch(run_id, metrics=metrics)

        try:
            yield _guarded("mlflow", begin, log)
            status = "FINISHED"
        finally:
            if run_id:
                client.set_terminated(run_id, status)

    def _create(self, mlflow: Any, client: Any, run_dir: Path, config: dict[str, Any]) -> str:
        known = client.get_experiment_by_name(self.experiment)
        experiment = known.experiment_id if known else client.create_experiment(self.experiment)
        run_id = client.create_run(experiment, run_name=self.name or run_dir.name).info.run_id
        params = [mlflow.entities.Param(key, str(value)) for key, value in flatten_with_paths(config).items()]
        for start in range(0, len(params), 100):  # MLflow's limit for a batch
            client.log_batch(run_id, params=params[start : start + 100])
        return run_id


class Prometheus(_Logger):
    """Metrics for Prometheus, which scrapes them from the first process. Extra: `meshpar[metrics]`."""

    kind: Literal["prometheus"] = "prometheus"
    host: str = "127.0.0.1"
    """Address of the interface; by default only this machine reaches it."""
    port: Annotated[int, pydantic.Field(ge=1, le=65535)] = 9464
    """Port at which `/metrics` is served; `meshpar train --metrics-port` sets it too."""

    def open(self, run_dir: Path) -> AbstractContextManager[Sink]:
        return serving(run_dir, self.host, self.port)


Logger = Annotated[TensorBoard | WandB | MLflow | Prometheus, pydantic.Field(discriminator="kind")]


def numbers(record: Record) -> dict[str, float]:
    """The finite numbers of a record: `kind/name` -> number.

    >>> numbers({"kind": "train", "step": 3, "loss": 2.5, "lr": float("nan"), "why": "a text"})
    {'train/loss': 2.5}
    """
    values = {name: value for name, value in record.items() if name != "step" and isinstance(value, (int, float))}
    return {f"{record['kind']}/{name}": value for name, value in values.items() if math.isfinite(value)}


def _guarded(name: str, begin: Callable[[dict[str, Any]], None], log: Sink) -> Sink:
    """Raises if a service cannot start. If it fails later, warns once and sends it no more records."""
    failed = False

    def write(record: Record) -> None:
        nonlocal failed
        if record["kind"] == "run":
            try:
                return begin(record["config"])
            except Exception as error:
                raise ConfigError(f"loggers: {name} cannot start: {error}") from error
        try:
            return log(record) if numbers(record) and not failed else None
        except Exception as error:
            failed = True
            warnings.warn(f"{name} fails, and gets no more records: {error}", stacklevel=2)

    return write


def _extra(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        what = "is not installed" if error.name == package else f"cannot be imported: {error}"
        raise ConfigError(f"loggers: {package} {what}; pip install 'meshpar[{package}]', or leave it out") from None


def _stored(file: Path, make: Callable[[], str]) -> str:
    """The content of a file. If the file does not exist, `make` computes the content, which is written first."""
    if not file.exists():
        file.write_text(make())
    return file.read_text().strip()
