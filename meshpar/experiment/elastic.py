"""Runs a training in several processes of this machine, and again in fewer of them after some have failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from meshpar.errors import MeshparError
from meshpar.experiment.config import Run
from meshpar.experiment.prepare import prepare
from meshpar.launch.elastic import Membership
from meshpar.launch.workers import Ended, Group, Worker, never


@dataclass(frozen=True)
class Attempts:
    """Runs the program of a training; with fewer processes, on the smaller mesh that `elastic` sets.

    Args:
      group: all processes; its command accepts overrides of the config at its end, and `--devices`.
      num_devices: the simulated devices of all processes together; None if each process uses its host's devices.
      each_poll: see `Group.run`.
    """

    run: Run
    group: Group
    num_devices: int | None
    each_poll: Callable[[Sequence[Worker]], bool] = never

    def __call__(self, size: int) -> Ended:
        """Runs the program in `size` processes until it ends."""
        has_grown = self.members.watch(size)
        group = self.group if size == self.group.num_processes else self._smaller(size)
        return group.run(lambda workers: self.each_poll(workers) or has_grown(workers))

    @cached_property
    def members(self) -> Membership:
        return Membership(self.group.num_processes, self.run.elastic, cache(self.fits))

    def fits(self, size: int) -> bool:
        """Whether the layout allows `size` processes. Nothing is allocated or compiled."""
        mesh = self.run.elastic.resized(self.run.mesh) if self.run.elastic else self.run.mesh
        try:
            prepare(self.run.model_copy(update={"mesh": mesh}), mesh.abstract(size * self._share))
        except MeshparError:
            return False
        return True

    @property
    def _share(self) -> int:
        """The number of devices of a process."""
        return self.num_devices // self.group.num_processes if self.num_devices else 1

    def _smaller(self, size: int) -> Group:
        overrides = self.run.elastic.overrides if self.run.elastic else []
        devices = [f"--devices={size * self._share}"] if self.num_devices else []
        return replace(self.group, num_processes=size, command=[*self.group.command, *overrides, *devices])
