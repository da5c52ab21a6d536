"""Trains the points of a grid, each by `meshpar train` in a process and a folder of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from meshpar.checkpoint.lock import hold_alone
from meshpar.errors import ConfigError, MeshparError, Problems
from meshpar.experiment.config import Run, load
from meshpar.experiment.prepare import prepare
from meshpar.interop import user_code
from meshpar.mesh import driver
from meshpar.progress import busy, say
from meshpar.records.file import FILE
from meshpar.sweep import plot, recorded
from meshpar.sweep.grid import Point, read
from meshpar.sweep.outcome import Outcome, Swept, direction, ended, failed
from meshpar.train.loop.signals import Interrupted

OUTPUT, RESULT, PICTURE = "output.log", "sweep.json", "sweep.png"
POLL_S = 0.1


@dataclass
class Sweep:
    """The runs of a grid.

    Args:
      config: the config file of all runs.
      fixed: overrides of all runs.
      runs: the config of each point.
      devices: the number of CPU devices that each run simulates.
      command: runs meshpar.
    """

    config: Path
    fixed: Sequence[str]
    runs: Mapping[Point, Run]
    devices: int | None
    metric: str
    best: str
    command: Sequence[str] = (sys.executable, "-m", "meshpar")
    running: dict[Point, subprocess.Popen[bytes]] = field(default_factory=dict)
    outcomes: dict[Point, Outcome] = field(default_factory=dict)

    def train(self, parallel: int) -> Swept:
        """Trains all runs that have not ended, a number of them at a time.

        Raises:
          Interrupted: a signal came; the runs have saved their last steps.
          ConfigError: the runs have no such metric.
        """
        for point, run in self.runs.items():
            if found := ended(point, run):
                self._note(found)
        waiting = [point for point in self.runs if point not in self.outcomes]
        with self._stopped_at_the_end(), _noticing() as caught:
            while (waiting or self.running) and not caught:
                while waiting and len(self.running) < parallel:
                    self._begin(waiting.pop(0))
                time.sleep(POLL_S)
                for point in [point for point, process in self.running.items() if process.poll() is not None]:
                    self._end(point)
        if caught:
            raise Interrupted(f"stopped by {caught[0].name}; the same command goes on with these runs")
        return self.swept

    @property
    def swept(self) -> Swept:
        found = [self.outcomes[point] for point in self.runs if point in self.outcomes]
        return Swept(found, self.metric, direction(self.metric, self.best))

    def _note(self, outcome: Outcome) -> None:
        self.outcomes[outcome.point] = outcome
        self.swept.check()

    def _begin(self, point: Point) -> None:
        run = self.runs[point]
        folder = run.run_dir
        folder.mkdir(parents=True, exist_ok=True)
        imports = [word for path in user_code.named() for word in ("--import", str(path))]
        devices = [f"--devices={self.devices}"] if self.devices else []
        words = ["train", str(self.config), *_overrides(self.fixed, point, folder, run.checkpoints.mirror), *devices]
        with (folder / OUTPUT).open("ab") as output:
            self.running[point] = subprocess.Popen(
                [*self.command, *imports, *words],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        say(f"{point.name}: begins; {folder / OUTPUT}")

    def _end(self, point: Point) -> None:
        code = self.running.pop(point).returncode
        run = self.runs[point]
        outcome = None if code else ended(point, run)
        if outcome is None:
            lines = (run.run_dir / OUTPUT).read_text(errors="replace").strip().splitlines()
            outcome = failed(point, run, lines[-1] if lines else f"exit code {code}")
        say(f"{point.name}: {'failed' if outcome.why else 'ended'} at step {outcome.step}")
        self._note(outcome)

    @contextmanager
    def _stopped_at_the_end(self) -> Iterator[None]:
        """On exit, stops the runs that still train; they save their last steps."""
        try:
            yield
        finally:
            for process in self.running.values():
                process.send_signal(signal.SIGTERM)
            for process in self.running.values():
                process.wait()


def sweep(
    config: Path, overrides: Sequence[str], parallel: int, metric: str, best: str | None, devices: int | None
) -> Swept:
    """Checks all runs of a grid, trains them, and writes what they reached into their folder.

    Raises:
      ConfigError: lists every value and every run that is wrong; nothing was trained.
      Interrupted: see `Sweep.train`.
    """
    towards = direction(metric, best)
    if parallel > 1 and has_accelerator():
        what = "each run would take all accelerators of this machine"
        raise ConfigError(f"--parallel {parallel}: {what}; --parallel 1, or JAX_PLATFORMS=cpu")
    fixed, points = read(overrides)
    folder = _folder(config, [*fixed, *points[0].overrides])
    if (folder / FILE).is_file():
        raise ConfigError(f"run_dir: {folder} is the folder of a run; a sweep needs one of its own: run_dir=...")
    with busy(f"checking {len(points)} runs"):
        runs = _checked(config, fixed, points, folder, devices, metric)
    folder.mkdir(parents=True, exist_ok=True)
    with hold_alone(folder):
        found = Sweep(config, fixed, runs, devices, metric, towards).train(parallel)
        (folder / RESULT).write_text(json.dumps(found.as_json(), indent=2))
        if not plot.draw(found, folder / PICTURE):
            say(f"no {PICTURE}: matplotlib is not installed; pip install 'meshpar[plot]'")
    return found


def has_accelerator(root: Path = Path("/")) -> bool:
    """Whether JAX may find GPUs or TPUs here."""
    only_cpus = os.environ.get("JAX_PLATFORMS") == "cpu"
    return not only_cpus and (driver.is_installed(root) or any(root.glob("dev/accel*")))


def _overrides(fixed: Sequence[str], point: Point, folder: Path, mirror: str | None = None) -> list[str]:
    others = [override for override in fixed if not override.startswith("run_dir=")]
    copied = [f"checkpoints.mirror={json.dumps(mirror)}"] if mirror else []
    return [*others, *point.overrides, *copied, f"run_dir={json.dumps(str(folder))}"]


def _load(config: Path, fixed: Sequence[str], point: Point, folder: Path) -> Run:
    """The run of a point. Where the config has a mirror, each run is copied to a folder of its own below it."""
    run = load(config, _overrides(fixed, point, folder))
    if not (mirror := run.checkpoints.mirror):
        return run
    return load(config, _overrides(fixed, point, folder, f"{mirror.rstrip('/')}/{point.name}"))


def _folder(config: Path, overrides: Sequence[str]) -> Path:
    """The folder of all runs. If the config is wrong, `_checked` reports that with the faults of all points."""
    with suppress(ConfigError):
        return load(config, overrides).run_dir
    return Path()


def _checked(
    config: Path, fixed: Sequence[str], points: Sequence[Point], folder: Path, devices: int | None, metric: str
) -> dict[Point, Run]:
    """The config of each point."""
    problems = Problems()
    runs: dict[Point, Run] = {}
    seen: set[str] = set()
    for point in points:
        try:
            run = _load(config, fixed, point, folder / point.name)
            prepared = prepare(run, run.mesh.abstract(devices))
            if not runs:  # they differ in values, and not in what they record
                recorded.check(metric, prepared)
            runs[point] = run
        except MeshparError as error:
            if str(error) not in seen:  # a value that is wrong in many points is one problem
                seen.add(str(error))
                problems.add(point.name, str(error).replace("\n", "\n    "))
    problems.raise_any(ConfigError, "these runs cannot be trained:")
    return runs


@contextmanager
def _noticing() -> Iterator[list[signal.Signals]]:
    """Yields a list that receives SIGINT and SIGTERM."""
    caught: list[signal.Signals] = []
    before = {
        number: signal.signal(number, lambda got, _: caught.append(signal.Signals(got)))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
