"""A run's metrics, scraped by the parser of Prometheus' client library and by a real Prometheus."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshpar.errors import ConfigError
from meshpar.launch.workers import free_port
from meshpar.loggers import Prometheus
from meshpar.records.loggers import Record
from meshpar.records.metrics import recorder
from tests.waiting import wait_for


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        families = text_string_to_metric_families(page.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}


def train_record(step: int, **values: float) -> Record:
    return {"kind": "train", "step": step, "loss": 5.0 / step, "tokens_per_s": 100.0, **values}


def restarted(run_dir: Path) -> None:
    """Writes the records of a run that began 100 s ago, came to step 20, and lost the steps from 11 on."""
    began = (datetime.now(UTC) - timedelta(seconds=100)).isoformat()
    records = [
        {"kind": "run", "step": 0, "began": began, "config": {}},
        *(train_record(step, **({"step_s": 4.0} if step > 1 else {})) for step in (1, 11, 20)),
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_metrics_of_a_run_that_began_again(tmp_path: Path):
    restarted(tmp_path)
    port = free_port()
    with recorder(tmp_path, 30, as_json=True, loggers=[Prometheus(port=port)]) as record:
        record.begin(11, {})
        before = scrape(port)
        record.record("train", 12, loss=2.5, tokens_per_s=50.0, mfu=0.4)
        record.record("train", 17, loss=2.0, tokens_per_s=60.0, mfu=0.5, step_s=4.0)
        record.record("checkpoint", 17, blocked_s=0.25)
        after = scrape(port)
    assert before["meshpar_restarts"] == 1
    assert before["meshpar_goodput_ratio"] == pytest.approx(0.4, abs=0.02)  # 10 steps of 4 s in 100 s; 9 are lost
    assert after["meshpar_goodput_ratio"] == pytest.approx(0.6, abs=0.02)
    expected = {"step": 17, "loss": 2.0, "tokens_per_second": 60, "mfu_ratio": 0.5, "checkpoint_seconds": 0.25}
    assert {name: after[f"meshpar_{name}"] for name in expected} == expected


def test_a_port_in_use_is_refused(tmp_path: Path):
    port = free_port()
    logger = Prometheus(port=port)
    with logger.open(tmp_path), pytest.raises(ConfigError, match=rf"--metrics-port: .*:{port}: .*; choose another"):
        logger.open(tmp_path / "other").__enter__()


def test_the_option_adds_the_logger(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from meshpar.experiment import actions

    passed = []
    monkeypatch.setattr(actions, "fit", lambda run, **options: passed.append(run.loggers))
    words = ("train", "configs/quickstart.yaml", f"run_dir={tmp_path}", "--metrics-port=9400")
    assert command(*words).code == 0
    assert passed[0][-1] == Prometheus(host="127.0.0.1", port=9400)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus")
def test_a_real_prometheus_scrapes_a_run(tmp_path: Path):
    port = free_port()
    own = free_port()
    target = {"job_name": "run", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [target]}
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    options = {
        "config.file": tmp_path / "prometheus.yml",
        "storage.tsdb.path": tmp_path / "series",
        "web.listen-address": f"127.0.0.1:{own}",
    }
    command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
    with (
        recorder(tmp_path, 30, as_json=True, loggers=[Prometheus(port=port)]) as record,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server,
    ):
        try:
            record.begin(0, {})
            record.record("train", 7, loss=2.5)
            wait_for(lambda: asked(own, "meshpar_loss") == ["2.5"])
            assert asked(own, "meshpar_step") == ["7"]
            assert asked(own, "meshpar_gain") == []
        finally:
            server.kill()


def asked(port: int, query: str) -> list[str]:
    """The values that Prometheus answers with; none as long as it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?query={query}") as page:
            return [result["value"][1] for result in json.load(page)["data"]["result"]]
    except OSError:
        return []
