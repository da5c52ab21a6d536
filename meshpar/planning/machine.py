"""The machine that a plan is for: its chips, the networks between them, and how long a collective takes on them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np

from meshpar.cost.traced import Axes, Collective
from meshpar.errors import MeshError
from meshpar.mesh.hardware import LINKS, Links
from meshpar.mesh.targets import Target
from meshpar.sharding.resolve import AnyMesh

EFFICIENCY = 0.7
"""The share of a chip's peak that large matrix products reach. An assumption, the same for all chips: it changes how
compute compares with communication, so measure it where a plan is close."""


@dataclass(frozen=True)
class Machine:
    """Devices of one kind, in hosts (GPU) or slices (TPU).

    Args:
      text: its name.
      num_devices: in all hosts.
      per_host: devices that the fast network joins.
      flops: operations a second that a device reaches in matrix products.
      memory_bytes: of a device.
      links: the networks inside a host and across hosts.
      overlaps: whether devices communicate while they compute.
    """

    text: str
    num_devices: int
    per_host: int
    flops: float
    memory_bytes: float
    links: Links
    overlaps: bool = True

    @classmethod
    def of(cls, target: Target, efficiency: float = EFFICIENCY) -> Self:
        """A target machine, by its makers' figures.

        Raises:
          MeshError: the bandwidth of its links is not known.
        """
        if target.chip.name not in LINKS:
            known = ", ".join(LINKS)
            raise MeshError(
                f"--target {target.text}: the links of {target.chip.name} are not known; those are: {known}"
            )
        per_host = target.num_chips if target.is_tpu else target.shape[-1]
        chip = target.chip
        flops = efficiency * chip.flops
        return cls(target.text, target.num_chips, per_host, flops, chip.memory_bytes, LINKS[chip.name])

    def seconds(self, one: Collective, mesh: AnyMesh) -> float:
        """The time of all runs of a collective in a step.

        A group of n devices, m of them on each of its hosts, sends over m links across hosts at once, as NCCL's rings
        do. An algorithm needs at least ceil(log2(n)) messages one after another, twice as many for an all-reduce.
        """
        size = one.group_size
        sent = float(one.sent_bytes)
        together = _per_host(one.axes, tuple(mesh.shape.items()), self.per_host)
        inside = self.links.inside
        across = self.links.across
        link = inside if together == size else across
        inside_bytes_per_s = inside.bytes_per_s * (2 if inside.torus else 1)
        messages = math.ceil(math.log2(size)) * (2 if one.kind == "all_reduce" else 1)
        if one.kind == "collective_permute":
            messages = 1
        if link is inside:
            moving = sent / inside_bytes_per_s
        elif one.kind == "collective_permute":
            moving = sent / across.bytes_per_s
        elif one.kind in ("all_to_all", "ragged_all_to_all"):
            beyond = (size - together) / (size - 1)
            moving = max(sent * beyond / across.bytes_per_s, sent / inside_bytes_per_s)
        else:
            moving = sent / min(together * across.bytes_per_s, inside_bytes_per_s)
        return float(one.times) * (messages * link.latency_s + moving)


@cache
def _per_host(axes: Axes, sizes: tuple[tuple[str, int], ...], per_host: int) -> int:
    """How many devices of a group over these axes are on the same host, at most."""
    numbers = np.arange(math.prod(size for _, size in sizes)).reshape([size for _, size in sizes])
    group = numbers[tuple(slice(None) if axis in axes else 0 for axis, _ in sizes)]
    return int(np.bincount(group.ravel() // per_host).max())
