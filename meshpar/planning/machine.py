"""The machine that a plan is for: its chips, the networks between them, and how long a collective takes on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol, Self

import numpy as np

from meshpar.cost.flops import ProductSizes
from meshpar.cost.touched import Touch
from meshpar.cost.traced import Axes, Collective
from meshpar.errors import MeshError
from meshpar.mesh.hardware import LINKS, Chip, Link, Links
from meshpar.mesh.layout import slices_by_stage
from meshpar.mesh.targets import Target
from meshpar.sharding.resolve import AnyMesh

Sizes = tuple[tuple[str, int], ...]
"""(axis, size) of some axes of a mesh."""
EFFICIENCY = 0.7
"""The share of a chip's peak that products reach whose tiles fill all cores. An assumption, the same for all chips.
`plan --published` prints the factor by which each published source differs from it."""
ATTENTION = 0.5
"""The share of a chip's peak that kernels of attention reach, forward and backward together: FlashAttention-2 reaches
50 to 73 % on A100s (arXiv:2307.08691), cuDNN 40 % in rows of 2,048 tokens on the one H100 that was measured."""
MEMORY = 0.9
"""The share of a memory's bandwidth that operations reach which read and write arrays once."""
PROLOGUE = 64
"""Terms of a product's sums that take as long as to start it: a slice of CUTLASS's default tile, which is loaded before
the first is multiplied."""
BLOCK = 128
"""Queries of a tile of an attention kernel. Of the tiles on the diagonal a causal kernel computes all."""
LAUNCH_S = 0.9e-6
"""Between two kernels of a GPU: 3.8 us for one of 2.9 us if launches overlap it
(developer.nvidia.com/blog/cuda-graphs)."""


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

    def product_s(self, one: ProductSizes) -> float:
        """Seconds of a matrix product, on every device at once."""
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
      chip: the makers' figures of a device. None: products take their operations, and nothing else takes time.
      attention: operations a second that a kernel of attention reaches.
      launched_s: seconds between two kernels. Default: `LAUNCH_S` of GPUs.
    """

    text: str
    num_devices: int
    per_host: int
    flops: float
    memory_bytes: float
    links: Links
    platform: str = "gpu"
    overlaps: bool = True
    chip: Chip | None = None
    attention: float = 0.0
    launched_s: float | None = None

    @classmethod
    def of(cls, target: Target, efficiency: float = EFFICIENCY, links: Links | None = None) -> Self:
        """A target machine, by its makers' figures.

        Args:
          links: default: the makers'.

        Raises:
          MeshError: the bandwidth of its links is not known.
        """
        if links is None and target.chip.name not in LINKS:
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
            links=links or LINKS[chip.name],
            platform="tpu" if target.is_tpu else "gpu",
            chip=chip,
            attention=ATTENTION * chip.flops,
        )

    def scaled(self, products: float = 1.0, links: float = 1.0) -> Self:
        """The machine with other speeds of products, attention among them, and of links."""
        inside, across = self.links.inside, self.links.across
        return replace(
            self,
            flops=self.flops * products,
            attention=self.attention * products,
            links=Links(
                replace(inside, bytes_per_s=inside.bytes_per_s * links),
                replace(across, bytes_per_s=across.bytes_per_s * links),
            ),
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
            Figure("TFLOP/s in products", self.flops / 1e12, self.scaled),
            Figure(
                f"GB/s inside a {'slice' if inside.torus else 'host'}",
                inside.bytes_per_s / 1e9,
                lambda factor: self._with(inside=replace(inside, bytes_per_s=inside.bytes_per_s * factor)),
            ),
        ]
        chip = self.chip
        if chip is not None:

            def with_memory(factor: float) -> StatedMachine:
                return replace(self, chip=replace(chip, memory_bytes_per_s=chip.memory_bytes_per_s * factor))

            found.append(Figure("GB/s of memory", MEMORY * chip.memory_bytes_per_s / 1e9, with_memory))
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

    def product_s(self, one: ProductSizes) -> float:
        """Seconds of a product: of the tiles that the cores compute at once, or to read and write it if that is longer.

        Attention's kernels have another rate, and compute the diagonal's tiles whole.
        """
        chip = self.chip
        if chip is None:
            return one.num_flops / self.flops
        memory_s = one.num_bytes / (MEMORY * chip.memory_bytes_per_s)
        if one.is_attention:
            whole = 1 + BLOCK / max(one.columns, BLOCK)
            return max(one.num_flops * whole / self.attention, memory_s) + self.launch_s
        narrow = chip.flops8 / chip.flops if one.width == 1 and chip.flops8 else 1.0
        wide = 0.5 if one.width > 2 and not self.is_tpu else 1.0  # TF32 on GPUs
        products_s = one.num_flops / (self.flops * narrow * wide * filled(one, chip))
        return max(products_s, memory_s) + self.launch_s

    @property
    def is_tpu(self) -> bool:
        return self.platform == "tpu"

    @property
    def launch_s(self) -> float:
        """Between two operations; a TPU's program is one."""
        if self.launched_s is not None:
            return self.launched_s
        return 0.0 if self.is_tpu or self.chip is None else LAUNCH_S

    def touch_s(self, one: Touch) -> float:
        """Seconds to read and write the arrays of an operation, whose functions a chip computes meanwhile."""
        if self.chip is None or not one.num_bytes:
            return 0.0
        return one.num_bytes / (MEMORY * self.chip.memory_bytes_per_s) + self.launch_s

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
def filled(one: ProductSizes, chip: Chip) -> float:
    """The part of the tiles that a product's operations fill, at the best tile and number of parts of its sums.

    A core computes a tile at a time, also where the matrix ends inside it (tile quantization), and all cores wait for
    the last tiles (wave quantization). Where there are few tiles, cores share the sums of one.
    Source: docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication

    >>> from meshpar.mesh.hardware import CHIPS
    >>> h100 = next(chip for chip in CHIPS if chip.name == "H100 SXM")
    >>> def square(n):
    ...     return ProductSizes("dot_general", 2 * n**3, 1, n, n, n, 2)
    >>> round(filled(square(8192), h100), 3), round(filled(square(1000), h100), 3)
    (0.97, 0.82)
    """
    if one.rows * one.columns * one.terms == 1:
        return 1.0
    best = 0.0
    rows, columns = chip.tile
    tiles = {(rows, columns), (columns, rows), (columns, columns)}
    for height, width in tiles:
        tall, wide = math.ceil(one.rows / height), math.ceil(one.columns / width)
        inside = one.rows * one.columns / (tall * height * wide * width)
        for parts in (1, 2, 4, 8):
            each = one.terms / parts
            num = one.batch * tall * wide * parts
            waves = math.ceil(num / chip.cores)
            best = max(best, inside * num / (waves * chip.cores) * each / (each + PROLOGUE))
    return best


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
