"""The machine that a plan is for: its chips, the networks between them, and how long a collective takes on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol, Self

import numpy as np

from meshpar.cost.touched import Touch
from meshpar.cost.traced import Axes, Collective
from meshpar.errors import MeshError
from meshpar.mesh.hardware import LINKS, Link, Links
from meshpar.mesh.layout import slices_by_stage
from meshpar.mesh.targets import Target
from meshpar.sharding.resolve import AnyMesh

Sizes = tuple[tuple[str, int], ...]
"""(axis, size) of some axes of a mesh."""
EFFICIENCY = 0.7
"""The share of a chip's peak that large matrix products reach. An assumption, the same for all chips: it changes how
compute compares with communication, so measure it where a plan is close."""


@dataclass(frozen=True)
class Figure:
    """A figure of a machine that might be another one.

    Args:
      name: its unit, and what it is.
      scaled: factor -> the machine with the figure times the factor.
    """

    name: str
    value: float
    scaled: Callable[[float], Machine]


class Machine(Protocol):
    """What a plan needs to know of a machine.

    Attributes:
      text: its name.
      platform: the one that steps are traced for: `cpu`, `gpu` or `tpu`.
      num_devices: the number of devices in all hosts.
      per_host: devices that the fast network joins.
      memory_bytes: memory of a device.
      overlaps: whether devices communicate while they compute.
      shares_cores: whether devices are simulated by the same cores: while one waits, others use the cores.
      figures: the figures that `alternatives` changes.
      targets: the machines that programs are compiled for, see `mesh.targets`; none for the devices of this process.
    """

    @property
    def text(self) -> str: ...
    @property
    def platform(self) -> str: ...
    @property
    def num_devices(self) -> int: ...
    @property
    def per_host(self) -> int: ...
    @property
    def memory_bytes(self) -> float: ...
    @property
    def overlaps(self) -> bool: ...
    @property
    def shares_cores(self) -> bool: ...

    @property
    def figures(self) -> Sequence[Figure]: ...
    @property
    def targets(self) -> Sequence[str]: ...

    def product_s(self, flops: float) -> float:
        """Seconds of a matrix product with so many operations, on every device at once."""
        ...

    def touch_s(self, one: Touch) -> float:
        """Seconds of an operation beside products and collectives, on every device at once."""
        ...

    def new_memory_s(self, num_bytes: float) -> float:
        """Seconds of the memory that each step takes from the system, on every device at once."""
        ...

    def collective_s(self, one: Collective, mesh: AnyMesh, dcn: Sizes = ()) -> float:
        """Seconds of all runs of a collective in a step.

        Args:
          dcn: (axis, size) of the part of the mesh's axes that is across hosts; empty where hosts follow the axes'
            order.
        """
        ...

    def stages(self, mesh: AnyMesh, dcn: Sizes = ()) -> Sequence[Machine]:
        """For each stage of a pipeline, the machine that its devices are."""
        ...


@dataclass(frozen=True)
class StatedMachine:
    """A machine by its makers' figures: devices of one kind, in hosts (GPU) or slices (TPU).

    Args:
      flops: operations a second that a device reaches in matrix products.
      links: the networks inside a host and across hosts.
    """

    text: str
    num_devices: int
    per_host: int
    flops: float
    memory_bytes: float
    links: Links
    platform: str = "gpu"
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
        chip = target.chip
        return cls(
            text=target.text,
            num_devices=target.num_chips,
            per_host=target.num_chips if target.is_tpu else target.shape[-1],
            flops=efficiency * chip.flops,
            memory_bytes=chip.memory_bytes,
            links=LINKS[chip.name],
            platform="tpu" if target.is_tpu else "gpu",
        )

    @property
    def shares_cores(self) -> bool:
        return False

    @property
    def targets(self) -> Sequence[str]:
        return [self.text]

    @property
    def figures(self) -> Sequence[Figure]:
        inside = self.links.inside
        across = self.links.across
        found = [
            Figure("TFLOP/s in products", self.flops / 1e12, lambda factor: replace(self, flops=self.flops * factor)),
            Figure(
                f"GB/s inside a {'slice' if inside.torus else 'host'}",
                inside.bytes_per_s / 1e9,
                lambda factor: self._with(inside=replace(inside, bytes_per_s=inside.bytes_per_s * factor)),
            ),
        ]
        if self.per_host < self.num_devices:
            found.append(
                Figure(
                    "GB/s a device across hosts",
                    across.bytes_per_s / 1e9,
                    lambda factor: self._with(across=replace(across, bytes_per_s=across.bytes_per_s * factor)),
                )
            )
        return found

    def _with(self, **links: Link) -> StatedMachine:
        return replace(self, links=replace(self.links, **links))

    def product_s(self, flops: float) -> float:
        return flops / self.flops

    def touch_s(self, one: Touch) -> float:
        """Zero: a chip's kernels fuse operations, such as attention's, whose arrays the trace has in memory."""
        return 0.0

    def new_memory_s(self, num_bytes: float) -> float:
        """Zero: a chip's allocator keeps the memory of the last step."""
        return 0.0

    def stages(self, mesh: AnyMesh, dcn: Sizes = ()) -> Sequence[Machine]:
        return [self] * mesh.shape["pipe"]

    def collective_s(self, one: Collective, mesh: AnyMesh, dcn: Sizes = ()) -> float:
        """Seconds of all runs of a collective in a step.

        A group of n devices, m of them on each of its hosts, sends over m links across hosts at once, as NCCL's rings
        do. An algorithm needs at least ceil(log2(n)) messages one after another, twice as many for an all-reduce.
        """
        size = one.group_size
        sent = float(one.sent_bytes)
        together = _per_host(one.axes, mesh.shape_tuple, dcn, self.per_host)
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
def hosts(sizes: Sizes, dcn: Sizes, per_host: int) -> np.ndarray:
    """The number of the host of each device, with a dim for each axis of the mesh, as `MeshLayout.build` orders them.

    Args:
      sizes: (axis, size) of the whole mesh.
      dcn: (axis, size) of the part of it that is across hosts.
    """
    shape = [size for _, size in sizes]
    if not dcn:
        return (np.arange(math.prod(shape)) // per_host).reshape(shape)
    across = dict(dcn)
    found = slices_by_stage([across.get(axis, 1) for axis, _ in sizes])
    for dim, (axis, size) in enumerate(sizes):
        found = np.repeat(found, size // across.get(axis, 1), dim)
    return found


@cache
def _per_host(axes: Axes, sizes: Sizes, dcn: Sizes, per_host: int) -> int:
    """How many devices of a group over these axes are on the same host, at most."""
    numbers = hosts(sizes, dcn, per_host)
    group = numbers[tuple(slice(None) if axis in axes else 0 for axis, _ in sizes)]
    return int(np.bincount(group.ravel()).max())
