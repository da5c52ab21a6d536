"""Lets a run continue with fewer processes after it lost some, and with all of them when they return."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import pydantic

from meshpar.config import Config, Positive, Section, default
from meshpar.launch.workers import Worker
from meshpar.mesh.layout import AxisSizes, MeshLayout


class Elastic(Config):
    """How a run under `meshpar launch` continues after it has lost processes.

    The global batch, the order of the data and the learning rate do not depend on the number of processes.
    """

    min_processes: Positive = 1
    """The fewest processes with which the run continues; with fewer it waits."""
    mesh: Section[AxisSizes] = default(AxisSizes())
    """Sizes of axes while processes are missing. The other axes keep their sizes."""
    return_s: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] = 300.0
    """Seconds after which a lost process counts as returned; the run then restarts with it."""

    @property
    def overrides(self) -> list[str]:
        """The changes to the config of the run, as `key=value`."""
        return [f"mesh.{axis}={size}" for axis, size in self._changes.items()]

    def resized(self, mesh: MeshLayout) -> MeshLayout:
        """The mesh of the run while processes are missing."""
        return mesh.model_copy(update=self._changes)

    @property
    def _changes(self) -> dict[str, int]:
        return {axis: size for axis, size in self.mesh.sizes.items() if axis in self.mesh.model_fields_set}


@dataclass
class Membership:
    """The processes that a run can have at the moment.

    Args:
      num_processes: the number of processes with which the run was started.
      elastic: None if the run always needs all processes.
      fits: whether the layout allows a number of processes.
      now: the time in seconds.
      returns: when each lost process returns.

    >>> clock = iter([0, 1, 2, 99, 99])
    >>> members = Membership(4, Elastic(min_processes=2, return_s=60), lambda n: n != 3, lambda: next(clock))
    >>> members.lose(1)
    >>> members.size(), members.has_grown(2), members.has_grown(2)
    (2, False, True)
    """

    num_processes: int
    elastic: Elastic | None = None
    fits: Callable[[int], bool] = bool
    now: Callable[[], float] = time.monotonic
    returns: list[float] = field(default_factory=list)

    def lose(self, num_lost: int) -> None:
        """Records that processes were lost."""
        if self.elastic:
            self.returns += [self.now() + self.elastic.return_s] * num_lost

    def size(self) -> int:
        """The largest number of available processes that the layout allows; 0 if the run has to wait."""
        if self.elastic is None:
            return self.num_processes
        now = self.now()
        self.returns = [when for when in self.returns if when > now]
        there = self.num_processes - len(self.returns)
        sizes = range(there, self.elastic.min_processes - 1, -1)
        return next((size for size in sizes if size == self.num_processes or self.fits(size)), 0)

    def has_grown(self, size: int) -> bool:
        """Whether more processes than `size` could run."""
        return size < self.num_processes and self.size() > size

    def wait(self) -> int:
        """Waits until `size` is not 0, and returns it."""
        while not (size := self.size()):
            time.sleep(min(1.0, max(0.0, min(self.returns) - self.now())))
        return size

    def watch(self, size: int) -> Callable[[Sequence[Worker]], bool]:
        """A poll for `Group.run`: ends an attempt with a checkpoint if more processes can run and all others train."""

        def has_grown(workers: Sequence[Worker]) -> bool:
            positions = [worker.position for worker in workers]
            return all(position and position.step for position in positions) and self.has_grown(size)

        return has_grown
