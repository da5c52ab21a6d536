"""Records reach W&B and MLflow: fakes that record the calls, and the real packages where they are installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshpar.errors import ConfigError
from meshpar.records.loggers import MLflow, WandB
from meshpar.records.metrics import recorder
from tests.waiting import wait_for


def run(run_dir: Path, *loggers: Any, start: int = 0) -> None:
    with recorder(run_dir, 3, as_json=True, loggers=loggers) as to:
        to.begin(start, {"optim": {"lr": 1e-3}, "freeze": []})
        to.record("train", start + 1, loss=2.5 - start, lr=float("nan"))
        to.record("stop", start + 1, why="a text", best=2.5)


class FakeWandB:
    """The part of W&B that meshpar calls: `init`, and its run's `log` and `__exit__`."""

    def __init__(self, fails: bool = False):
        self.calls: list[Any] = []
        self.fails = fails

    def init(self, **given: Any) -> FakeWandB:
        self.calls.append(("init", given))
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        if self.fails:
            raise OSError("no network")
        self.calls.append(("log", step, values))

    def __enter__(self) -> FakeWandB:
        return self

    def __exit__(self, *error: Any) -> None:
        self.calls.append(("end", error[0]))


@pytest.fixture
def wandb(monkeypatch) -> FakeWandB:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_config_and_numbers_and_a_resumed_run_is_the_same_run(tmp_path, wandb):
    run(tmp_path / "first", WandB(project="mine", mode="offline"))
    run(tmp_path / "first", WandB(project="mine"), start=1)
    (_, begun), *logged, end, (_, again), _, _, _ = wandb.calls
    assert logged == [("log", 1, {"train/loss": 2.5}), ("log", 1, {"stop/best": 2.5})]
    assert end == ("end", None)
    assert (begun["project"], begun["name"], begun["config"]["optim"]) == ("mine", "first", {"lr": 1e-3})
    assert begun["id"] == again["id"] and (begun["mode"], again["resume"]) == ("offline", "allow")


def test_a_service_that_fails_later_is_warned_of_once_and_training_continues(tmp_path, wandb):
    wandb.fails = True
    with pytest.warns(UserWarning, match="wandb fails, and gets no more records: no network") as warned:
        run(tmp_path, WandB())
    assert len(warned) == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


class FakeMLflow:
    """The calls of an MLflow client that meshpar uses."""

    def __init__(self):
        self.calls: list[Any] = []
        self.entities = SimpleNamespace(Metric=lambda *given: given, Param=lambda *given: given)

    def MlflowClient(self, uri: str) -> FakeMLflow:
        self.calls.append(("client", uri))
        return self

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return name

    def create_run(self, experiment: str, run_name: str) -> Any:
        self.calls.append(("create", experiment, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="7"))

    def update_run(self, run_id: str, status: str) -> None:
        self.calls.append((status, run_id))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        self.calls.append(("log", run_id, [(name, value, step) for name, value, _, step in metrics], list(params)))

    def set_terminated(self, run_id: str, status: str) -> None:
        self.calls.append((status, run_id))


def test_mlflow_gets_config_and_numbers_and_a_resumed_run_is_the_same_run(tmp_path, monkeypatch):
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run(tmp_path / "first", MLflow(experiment="mine"))
    run(tmp_path / "first", MLflow(experiment="mine"), start=1)
    database = ("client", f"sqlite:///{tmp_path / 'first' / 'mlflow.db'}")
    stops = ("log", "7", [("stop/best", 2.5, 1)], [])
    assert fake.calls == [
        database, ("create", "mine", "first"), ("log", "7", [], [("optim.lr", "0.001")]), ("RUNNING", "7"),
        ("log", "7", [("train/loss", 2.5, 1)], []), stops, ("FINISHED", "7"),
        database, ("RUNNING", "7"),
        ("log", "7", [("train/loss", 1.5, 2)], []), ("log", "7", [("stop/best", 2.5, 2)], []), ("FINISHED", "7"),
    ]  # fmt: skip


@pytest.mark.parametrize(("package", "logger"), [("wandb", WandB()), ("mlflow", MLflow())])
def test_a_missing_package_is_reported_with_its_extra(tmp_path, monkeypatch, package, logger):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("importlib.import_module", missing)
    message = f"loggers: {package} is not installed; pip install 'meshpar\\[{package}\\]', or leave it out"
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, logger)


def missing(name: str) -> Any:
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def there_is(package: str) -> Any:
    reason = f"{package} is not installed"
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=reason)


@pytest.mark.filterwarnings("ignore")  # warnings of W&B
@there_is("wandb")
def test_the_real_wandb_writes_records_offline(tmp_path):
    run(tmp_path / "first", WandB(mode="offline"))
    (file,) = (tmp_path / "first" / "wandb").glob("offline-run-*/*.wandb")
    wait_for(lambda: b"train/loss" in file.read_bytes())  # W&B's own process writes it, also after the run has ended


@pytest.mark.filterwarnings("ignore")  # warnings of MLflow
@there_is("mlflow")
def test_the_real_mlflow_writes_records_to_a_file(tmp_path, monkeypatch):
    import mlflow  # pyright: ignore

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run(tmp_path / "first", MLflow())
    run(tmp_path / "first", MLflow(), start=1)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'first' / 'mlflow.db'}")
    (logged,) = client.search_runs([client.get_experiment_by_name("meshpar").experiment_id])
    history = client.get_metric_history(logged.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(1, 2.5), (2, 1.5)]
    assert (logged.info.status, logged.data.params) == ("FINISHED", {"optim.lr": "0.001"})
