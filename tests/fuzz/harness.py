"""Runs cases in a worker process, and finds those that crash, do not end, or exhaust memory."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Case:
    """A command line, and the files in its working directory.

    Args:
      files: name -> base64 of the content; `link:name`, `fifo:name` and `dir:name` make a link, a pipe or a folder.
      plant: the fault that the verb commits instead, for a negative control.
    """

    words: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    plant: str | None = None

    def __str__(self) -> str:
        return json.dumps({"words": self.words, "files": self.files})


@dataclass(frozen=True)
class Fault:
    """A case that did not end with 0, 1 or 2, and what happened instead."""

    case: Case
    what: str

    def __str__(self) -> str:
        return f"{self.what}\n  {self.case}"


class Worker:
    """A process that runs cases; if a case does not end, the process is killed and replaced."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.process: subprocess.Popen[str] | None = None

    def started(self) -> subprocess.Popen[str]:
        if self.process is None:
            environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "100"}
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.worker"],
                cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True,
            )  # fmt: skip
            assert self.process.stdout and self.process.stdout.readline() == "ready\n"
        return self.process

    def run(self, case: Case) -> dict[str, Any] | str:
        """The reply; or why there is none."""
        process = self.started()
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps({"words": case.words, "files": case.files, "plant": case.plant}) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], self.timeout_s)
        reply = process.stdout.readline() if ready else ""
        if reply:
            return json.loads(reply)
        self.stop()
        return "the process died" if ready else f"no end in {self.timeout_s:g} s"

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


@contextmanager
def worker(timeout_s: float = TIMEOUT_S) -> Iterator[Worker]:
    made = Worker(timeout_s)
    try:
        yield made
    finally:
        made.stop()


def faults(cases: Iterable[Case], timeout_s: float = TIMEOUT_S) -> tuple[list[Fault], dict[int, int]]:
    """The cases that fail, and how many ended with each exit code."""
    found: list[Fault] = []
    codes: dict[int, int] = {}
    with worker(timeout_s) as runner:
        for case in cases:
            reply = runner.run(case)
            if isinstance(reply, str):
                found.append(Fault(case, reply))
            elif reply["code"] not in (0, 1, 2):
                found.append(Fault(case, str(reply["code"])[-3000:]))
            elif "Traceback (most recent call last)" in reply["out"] + reply["err"]:
                found.append(Fault(case, reply["err"]))
            else:
                codes[reply["code"]] = codes.get(reply["code"], 0) + 1
    return found, codes
