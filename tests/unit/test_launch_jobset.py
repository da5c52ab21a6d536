"""`meshpar launch --k8s`: the manifest against the schema of JobSet, what a pod finds out from it, and its errors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from meshpar.mesh import join

CONFIG = """
model: {kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32}
data: {kind: synthetic, batch_size: 8, seq_len: 8}
optim: {kind: adamw, lr: 1e-2}
mesh: {data: 8}
num_steps: 12
run_dir: /data/runs/Small 1
"""
SCHEMA = json.loads(Path(__file__).with_name("jobset.schema.json").read_text())
WORDS = ("--k8s", "--processes=1", "--nodes=4", "--image=example.org/meshpar:1", "--volume=runs:/data", "--restarts=3",
         "--limit=nvidia.com/gpu=2", "--dry-run")  # fmt: skip


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    return "config.yaml"


@pytest.fixture
def manifest(command, config) -> dict[str, Any]:
    said = command("launch", *WORDS, "--", "train", config, "data.seq_len=16")
    assert said.code == 0, said.err
    return yaml.safe_load(said.out)


def job_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]


def container_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return job_of(manifest)["template"]["spec"]["containers"][0]


def test_the_manifest_fits_the_schema_of_jobset(manifest):
    jsonschema.validate(manifest, SCHEMA)
    assert manifest["metadata"]["name"] == "small-1"
    assert job_of(manifest)["completions"] == job_of(manifest)["parallelism"] == 4
    assert container_of(manifest)["command"] == ["meshpar", "train", "config.yaml", "data.seq_len=16"]
    assert container_of(manifest)["resources"] == {"limits": {"nvidia.com/gpu": "2"}}


@pytest.mark.parametrize(
    "plant",
    [
        lambda manifest: manifest["spec"].update(replicatedJob=[]),
        lambda manifest: manifest["spec"]["failurePolicy"]["rules"][0].update(action="Restart"),
        lambda manifest: job_of(manifest).update(completions="4"),
        lambda manifest: container_of(manifest)["env"][0].update(value=4),
        lambda manifest: job_of(manifest)["podFailurePolicy"]["rules"][0].pop("onExitCodes"),
    ],
)
def test_control_the_schema_sees_wrong_manifests(manifest, plant):
    plant(manifest)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, SCHEMA)


def test_a_pod_finds_its_place_and_listens_at_its_own_address(manifest, monkeypatch):
    filled_in = {"status.podIP": "10.1.2.3", "metadata.annotations['batch.kubernetes.io/job-completion-index']": "0"}
    for variable in container_of(manifest)["env"]:
        value = variable.get("value") or filled_in[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        monkeypatch.setenv(variable["name"], value)
    found = join.place()
    assert found == join.Place("meshpar launch", 4, 0, "small-1-worker-0-0.small-1:8476")
    assert join._listens_at(found) == "10.1.2.3:8476"
    assert manifest["spec"]["network"]["subdomain"] == "small-1"


def test_an_interrupted_job_restarts_without_counting_and_bad_input_ends_it(manifest):
    policy = manifest["spec"]["failurePolicy"]
    exit_codes = job_of(manifest)["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]
    assert policy["maxRestarts"] == 3
    assert exit_codes == [2, join.INTERRUPTED]
    assert [rule["action"] for rule in policy["rules"]] == ["FailJobSet", "RestartJobSetAndIgnoreMaxRestarts"]


@pytest.mark.parametrize(("code", "told"), [(0, "jobset created"), (1, "--k8s: kubectl refuses the manifest: no such")])
def test_the_manifest_goes_to_kubectl(command, config, monkeypatch, code, told):
    stand_in = Path("bin/kubectl")
    stand_in.parent.mkdir()
    answer = "echo no such kind >&2" if code else "echo jobset created"
    stand_in.write_text(f'#!/bin/bash\necho "$@" > called\ncat > manifest.yaml\n{answer}\nexit {code}\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent.absolute()}:{os.environ['PATH']}")
    said = command("launch", *WORDS[:-1], "--", "train", config)
    assert told in said.out + said.err
    assert said.code == 2 * code
    assert Path("called").read_text() == "create --filename=-\n"
    jsonschema.validate(yaml.safe_load(Path("manifest.yaml").read_text()), SCHEMA)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*WORDS, "--slurm"], "--slurm and --k8s: a job has one scheduler"),
        (WORDS[:3], "--k8s: the pods need an image; add --image IMAGE"),
        ([*WORDS, "--sbatch=--partition=long"], "--sbatch: for a scheduler's job; add --slurm"),
        (["--processes=2", "--image=x", "--volume=a:/b"], "--image, --volume: for a scheduler's job; add --k8s"),
        ([*WORDS, "--volume=runs"], "--volume runs: is not CLAIM:PATH"),
        ([*WORDS, "--limit=gpu"], "--limit gpu: is not RESOURCE=N"),
        ([*WORDS, "--name=My Run"], "My Run is not a name of Kubernetes"),
        ([*WORDS[:4], *WORDS[5:]], "/data/runs/Small 1 is in no volume: it would be lost with its pod"),
        ([*WORDS, "--nodes=3"], "3 processes cannot share the 8 devices of the mesh evenly"),
    ],
)
def test_options_that_do_not_fit_are_refused(command, config, words, told):
    said = command("launch", *words, "--", "train", config)
    assert said.code == 2
    assert told in said.err


def test_without_kubectl_the_manifest_can_only_be_printed(command, config, monkeypatch):
    monkeypatch.setenv("PATH", "")
    said = command("launch", *WORDS[:-1], "--", "train", config)
    assert said.err == "meshpar: --k8s: kubectl is not on PATH; --dry-run prints the manifest, for a host that has it\n"
