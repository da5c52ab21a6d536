"""Runs a program under Kubernetes, as a JobSet with a pod for each process and a headless service."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from meshpar.config import to_yaml
from meshpar.errors import ConfigError, Problems, control_character
from meshpar.mesh.join import BIND, INTERRUPTED, PROCESS, Place

WORKERS = "worker"
CONTAINER = "meshpar"
PORT = 8476
SAVE_S = 120
"""Seconds in which a pod that is asked to end may save a checkpoint."""
BAD_INPUT = 2
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
LONGEST_NAME = 40
"""A pod's name, which ends in `-worker-0-INDEX`, has at most 63 characters."""


@dataclass(frozen=True)
class JobSet:
    """A JobSet, `jobset.x-k8s.io/v1alpha2`.

    A pod that is asked to end, for example by an eviction, ends the run after a step with a checkpoint and exit code
    75. Then all pods start again, as after a failure, but it does not count as a restart. Bad input fails the JobSet.

    Args:
      command: the arguments of `meshpar`, such as ["train", "config.yaml"].
      num_processes: number of pods.
      image: the container's image, with meshpar installed, and the config in its working directory.
      name: the name of the JobSet and of its service.
      run_dir: a folder in one of the volumes; None for a program that does not train.
      volumes: claim of a persistent volume, which all pods can write -> its path in the container.
      limits: resource -> quantity for a pod, such as {"nvidia.com/gpu": "8"}.
      restarts: the most restarts after failures.

    Raises:
      ConfigError: lists what is wrong with the name and the folder.
    """

    command: Sequence[str]
    num_processes: int
    image: str
    name: str
    run_dir: PurePosixPath | None = None
    volumes: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0

    def __post_init__(self) -> None:
        problems = Problems()
        if len(self.name) > LONGEST_NAME or not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", self.name):
            fix = f"at most {LONGEST_NAME} of a-z, 0-9 and -; it begins with a letter and ends with a letter or digit"
            problems.add("--name", f"{self.name} is not a name of Kubernetes", fix)
        volumes = [f"{claim}:{path}" for claim, path in self.volumes.items()]
        limits = [f"{resource}={quantity}" for resource, quantity in self.limits.items()]
        for option, texts in {"--image": [self.image], "--volume": volumes, "--limit": limits}.items():
            for text in texts:
                if control := control_character(text):
                    problems.add(f"{option} {text}", f"contains the control character {control}", "leave it out")
        if self.run_dir and not any(self.run_dir.is_relative_to(path) for path in self.volumes.values()):
            fix = "--volume CLAIM:PATH, and a run_dir in PATH"
            problems.add("run_dir", f"{self.run_dir} is in no volume: it would be lost with its pod", fix)
        problems.raise_any(ConfigError, "the JobSet cannot run:")

    def manifest(self) -> dict[str, Any]:
        """The JobSet as plain data."""
        job = {"name": WORKERS, "replicas": 1, "template": {"spec": self._job()}}
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": self.name},
            "spec": {
                # The headless service publishes a pod's name before the pod is ready, because processes join first.
                "network": {"enableDNSHostnames": True, "subdomain": self.name, "publishNotReadyAddresses": True},
                "failurePolicy": {"maxRestarts": self.restarts, "rules": _failure_rules()},
                "replicatedJobs": [job],
            },
        }

    def __str__(self) -> str:
        return to_yaml(self.manifest())

    def submit(self) -> str:
        """Creates the JobSet; returns the output of kubectl.

        Raises:
          ConfigError: there is no kubectl, or it refuses the manifest.
        """
        if shutil.which("kubectl") is None:
            raise ConfigError("--k8s: kubectl is not on PATH; --dry-run prints the manifest, for a host that has it")
        create = ["kubectl", "create", "--filename=-"]
        done = subprocess.run(create, input=str(self), text=True, capture_output=True, check=False)
        if done.returncode:
            raise ConfigError(f"--k8s: kubectl refuses the manifest: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout.strip()

    def _job(self) -> dict[str, Any]:
        ends = {"action": "FailJob", "onExitCodes": _on_exit_codes(BAD_INPUT, INTERRUPTED)}
        evicted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        return {
            "parallelism": self.num_processes,
            "completions": self.num_processes,
            "completionMode": "Indexed",
            "backoffLimit": 0,  # no pod starts again alone
            "podFailurePolicy": {"rules": [ends, evicted]},
            "template": {"spec": self._pod()},
        }

    def _pod(self) -> dict[str, Any]:
        container: dict[str, Any] = {
            "name": CONTAINER,
            "image": self.image,
            # Kubernetes replaces $(NAME) by the value of a variable, and $$ by $.
            "command": ["meshpar", *(word.replace("$", "$$") for word in self.command)],
            "env": self._variables(),
            "ports": [{"containerPort": PORT}],
        }
        if self.limits:
            container["resources"] = {"limits": dict(self.limits)}
        if self.volumes:
            container["volumeMounts"] = [{"name": claim, "mountPath": path} for claim, path in self.volumes.items()]
        pod: dict[str, Any] = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": SAVE_S,
            "containers": [container],
        }
        if self.volumes:
            claims = [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in self.volumes]
            pod["volumes"] = claims
        return pod

    def _variables(self) -> list[dict[str, Any]]:
        """The environment of a pod. Kubernetes fills in the values that differ between pods."""
        first = f"{self.name}-{WORKERS}-0-0.{self.name}:{PORT}"
        variables = Place("meshpar launch", self.num_processes, 0, first).variables()
        fields = {PROCESS: INDEX, BIND: "status.podIP"}
        return [
            *({"name": name, "value": value} for name, value in variables.items() if name not in fields),
            *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        ]


def parse_pairs(option: str, words: Sequence[str], separator: str, form: str) -> dict[str, str]:
    """Words such as CLAIM:PATH as a dict.

    Raises:
      ConfigError: a word has another form.

    >>> parse_pairs("--limit", ["nvidia.com/gpu=8"], "=", "RESOURCE=QUANTITY")
    {'nvidia.com/gpu': '8'}
    """
    pairs = [word.partition(separator) for word in words]
    for word, (left, _, right) in zip(words, pairs, strict=True):
        if not left or not right:
            raise ConfigError(f"{option} {word}: is not {form}")
    return {left: right for left, _, right in pairs}


def named(text: str) -> str:
    """A valid Kubernetes name from any text.

    >>> named("Llama_3 8B")
    'llama-3-8b'
    """
    name = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")
    return (name if name[:1].isalpha() else f"run-{name}")[:LONGEST_NAME].strip("-")


def _on_exit_codes(*codes: int) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": list(codes)}


def _failure_rules() -> list[dict[str, Any]]:
    """The actions after the job fails by its policy; any other failure counts as a restart of the JobSet."""
    bad_input = {
        "name": "badInput",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [f".* exit code {BAD_INPUT} .*"],
    }
    interrupted = {
        "name": "interrupted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return [bad_input, interrupted]
