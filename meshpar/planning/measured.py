"""A machine as `meshpar calibrate` measured it: a file of times by size, which `--target FILE` reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic

from meshpar.config import Config, Positive, load
from meshpar.cost.flat import EXPENSIVE
from meshpar.cost.flops import ProductSizes
from meshpar.cost.touched import TRANSPOSE, Touch
from meshpar.cost.traced import Collective
from meshpar.errors import ConfigError, Problems
from meshpar.planning.machine import Figure, Sizes
from meshpar.sharding.resolve import AnyMesh

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute"]
KINDS: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute")
_Real = Annotated[float, pydantic.Field(gt=0, strict=False)]


class Point(Config):
    """A measured time."""

    size: _Real
    """Operations of a product, or bytes."""
    seconds: _Real
    """Of one run, while all devices run the same."""


class CollectiveTimes(Config):
    """Measured times of one kind of collective."""

    kind: Kind
    """The collective."""
    group_size: Positive
    """Number of devices of a group; as many groups as there are run at once."""
    times: Annotated[tuple[Point, ...], pydantic.Field(min_length=1)]
    """Bytes of the whole buffer of a group -> seconds, for a permute bytes of a message."""


class FunctionTime(Config):
    """The measured time of a function of elements."""

    name: str
    """The function, as jaxprs name it."""
    seconds: _Real
    """Of one element, beyond the time to read and write it."""


class MeasuredMachine(Config):
    """The measured times of a machine with one host."""

    device: str
    """Kind of its devices, as JAX names it."""
    num_devices: Positive
    """Number of devices."""
    memory_bytes: Annotated[int, pydantic.Field(gt=0)]
    """Memory of a device, in bytes."""
    platform: Literal["cpu", "gpu", "tpu"]
    """Their platform."""
    shares_cores: bool = False
    """Whether more devices are simulated than the machine has cores: times are CPU seconds over cores then."""
    products: Annotated[tuple[Point, ...], pydantic.Field(min_length=1)]
    """Operations of a matrix product of float32 -> seconds."""
    elementwise: Annotated[tuple[Point, ...], pydantic.Field(min_length=1)]
    """Bytes that a sum or a product of elements reads and writes -> seconds."""
    functions: tuple[FunctionTime, ...]
    """Times of functions of elements, such as exp, and of transposing an element in memory."""
    new_memory: Annotated[tuple[Point, ...], pydantic.Field(min_length=1)]
    """Bytes that a program takes from the system -> seconds, beyond those of writing them. CPUs clear each page."""
    collectives: tuple[CollectiveTimes, ...]
    """Times of every kind of collective, in groups of every size that divides the number of devices."""

    @property
    def text(self) -> str:
        return f"{self.num_devices} x {self.device}, measured"

    @property
    def per_host(self) -> int:
        return self.num_devices

    @property
    def overlaps(self) -> bool:
        return self.platform != "cpu"

    @property
    def targets(self) -> Sequence[str]:
        return []

    @property
    def figures(self) -> Sequence[Figure]:
        def with_products(factor: float) -> MeasuredMachine:
            return self._changed(products=_faster(self.products, factor))

        def with_collectives(factor: float) -> MeasuredMachine:
            faster = [{**dict(one), "times": _faster(one.times, factor)} for one in self.collectives]
            return self._changed(collectives=faster)

        return [
            Figure("times the speed of products", 1.0, with_products),
            Figure("times the speed of collectives", 1.0, with_collectives),
        ]

    def _changed(self, **values: Any) -> MeasuredMachine:
        return MeasuredMachine.model_validate(dict(self) | values)

    def product_s(self, one: ProductSizes) -> float:
        """Seconds of a matrix product, on every device at once: by its operations."""
        return interpolated(self.products, one.num_flops)

    def touch_s(self, one: Touch) -> float:
        """Seconds of an operation beside products and collectives, on every device at once."""
        computed = sum(count * self._function_s[name] for name, count in one.functions)
        return interpolated(self.elementwise, one.num_bytes) + computed

    def new_memory_s(self, num_bytes: float) -> float:
        """Seconds of the memory that each step takes from the system, on every device at once."""
        return interpolated(self.new_memory, num_bytes)

    def stages(self, mesh: AnyMesh, dcn: Sizes = ()) -> Sequence[MeasuredMachine]:
        return [self] * mesh.shape["pipe"]

    def collective_s(self, one: Collective, mesh: AnyMesh, dcn: Sizes = ()) -> float:
        """Seconds of all runs of a collective in a step. A permute in which some devices send nothing sends less."""
        kind = one.kind.removeprefix("ragged_")
        size = one.full_bytes * (float(one.senders) if kind == "collective_permute" else 1.0)
        return float(one.times) * interpolated(self._tables[kind, one.group_size], size)

    @cached_property
    def _tables(self) -> dict[tuple[str, int], Sequence[Point]]:
        return {(one.kind, one.group_size): one.times for one in self.collectives}

    @cached_property
    def _function_s(self) -> dict[str, float]:
        return {one.name: one.seconds for one in self.functions}

    def check(self, name: str) -> None:
        """Checks that every function, and every collective of a layout, has a time.

        Raises:
          ConfigError: lists every time that is missing.
        """
        problems = Problems()
        for function in sorted({*EXPENSIVE, TRANSPOSE} - self._function_s.keys()):
            problems.add(f"functions: {function}", "has no time", "measure it: meshpar calibrate FILE")
        for size in group_sizes(self.num_devices):
            for kind in KINDS:
                if (kind, size) not in self._tables:
                    problems.add(f"{kind} in groups of {size}", "has no times", "measure them: meshpar calibrate FILE")
        problems.raise_any(ConfigError, f"--target {name} lacks times:")


def read(path: Path) -> MeasuredMachine:
    """Reads a file that `meshpar calibrate` wrote.

    Raises:
      ConfigError: lists every problem of the file.
    """
    machine = load(MeasuredMachine, path)
    machine.check(str(path))
    return machine


def group_sizes(num_devices: int) -> Iterable[int]:
    """The sizes of groups of more than one device that divide the devices."""
    return (size for size in range(2, num_devices + 1) if num_devices % size == 0)


def _faster(points: Iterable[Point], factor: float) -> tuple[Point, ...]:
    return tuple(Point(size=point.size, seconds=point.seconds / factor) for point in points)


def interpolated(points: Sequence[Point], size: float) -> float:
    """The time of a size: linear between two measured sizes; beyond the largest in proportion to it.

    >>> table = (Point(size=100, seconds=1.0), Point(size=300, seconds=2.0))
    >>> interpolated(table, 1), interpolated(table, 200), interpolated(table, 600)
    (1.0, 1.5, 4.0)
    """
    sizes = [point.size for point in points]
    seconds = [point.seconds for point in points]
    return float(np.interp(size, sizes, seconds)) * max(1.0, size / sizes[-1])
