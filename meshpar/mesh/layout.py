"""The device mesh: seven named axes over the available devices.

The axes are ordered by the networks that they usually span, slow to fast. Every mesh has all seven, so code can use
every name on every mesh. An axis of size 1 appears in no sharding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import numpy as np
import pydantic
from jax.experimental import mesh_utils
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from meshpar.config import Config, Section, build, default
from meshpar.errors import MeshError, Problem, Problems
from meshpar.mesh import process

AXES = ("replica", "data", "fsdp", "pipe", "expert", "context", "tensor")
MAX_DEVICES = 2**20
_AXIS_TYPES = (AxisType.Auto,) * len(AXES)

_Size = Annotated[int, pydantic.Field(ge=-1, le=MAX_DEVICES)]


class AxisSizes(Config):
    """The size of each axis; 1 by default."""

    replica: _Size = 1
    """Data parallelism between groups of `fsdp`, outermost: carries the batch."""
    data: _Size = 1
    """Data parallelism: carries the batch; parameters are replicated over it."""
    fsdp: _Size = 1
    """Carries the batch, and shards parameters or optimizer state (ZeRO)."""
    pipe: _Size = 1
    """Stages of a pipeline."""
    expert: _Size = 1
    """Carries the batch, and shards the experts of a layer."""
    context: _Size = 1
    """Shards the tokens of each row."""
    tensor: _Size = 1
    """Tensor parallelism: shards heads, MLP and vocabulary."""

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}


class MeshLayout(AxisSizes):
    """Sizes inside a slice (or host, or the whole machine), and across slices in `dcn`.

    One size may be -1, and is then computed from the number of devices. The size of an axis in the mesh is its size
    inside a slice times its size across slices.

    Raises:
      MeshError: the product of the sizes is not the number of devices; the text lists sizes that would fit.

    >>> MeshLayout(data=-1, tensor=2).resolved(8)["data"]
    4
    """

    dcn: Section[AxisSizes | None] = default(None)
    """Sizes across slices; default: one slice."""

    @classmethod
    def of(cls, sizes: MeshLayout | dict[str, Any] | str) -> MeshLayout:
        """The layout of sizes in a mapping, or in a text as on the command line.

        >>> MeshLayout.of("data=2, tensor=4") == MeshLayout.of({"data": 2, "tensor": 4})
        True
        """
        if isinstance(sizes, str):
            changes = [change.removeprefix("mesh.") for change in sizes.replace(",", " ").split()]
            return build(cls, {}, f"mesh {sizes!r}", changes)
        return cls.model_validate(sizes)

    @property
    def _across(self) -> dict[str, int]:
        return (self.dcn or AxisSizes()).sizes

    @property
    def _every_size(self) -> dict[str, int]:
        return self.sizes | {f"dcn.{axis}": size for axis, size in self._across.items()}

    def resolved(self, num_devices: int) -> dict[str, int]:
        """The size of every axis inside a slice, with -1 computed, for `num_devices` in all slices together."""
        self._check(num_devices)
        fixed = math.prod(size for size in self._every_size.values() if size != -1)
        return {axis: num_devices // fixed if size == -1 else size for axis, size in self.sizes.items()}

    def requested(self) -> int | None:
        """The product of all sizes, a number of devices; None if one of them is -1."""
        product = math.prod(self._every_size.values())
        return product if product > 0 else None

    def least(self) -> int:
        """The least number of devices that the sizes need; a size of -1 counts as one."""
        return math.prod(size for size in self._every_size.values() if size > 0)

    def simulate(self, num_devices: int | None) -> None:
        """Simulates `num_devices` CPU devices, or as many as all sizes need."""
        if count := num_devices or self.requested():
            process.simulate(count)

    def build(self, devices: Sequence[jax.Device] | None = None) -> Mesh:  # pyright: ignore[reportInvalidTypeForm]
        """The mesh over `devices`, with neighbours on fast axes close to each other in hardware.

        Default: all devices. A machine without an accelerator simulates as many as the sizes need, if JAX has not
        started yet.
        """
        if devices is None:
            devices = process.devices(self.least())
            if len(devices) < self.least():
                self._refuse(devices)
        inside = tuple(self.resolved(len(devices)).values())
        return Mesh(_arrange(devices, inside, tuple(self._across.values())), AXES, _AXIS_TYPES)

    def abstract(self, num_devices: int | None = None, platform: str | None = None) -> AbstractMesh:
        """The mesh without devices, which is enough to resolve, explain and trace.

        Args:
          platform: the platform that programs are traced for, such as `gpu`; None traces for CPUs.
        """
        inside = self.resolved(num_devices or self.requested() or 1)
        sizes = tuple(inside[axis] * self._across[axis] for axis in AXES)
        device = AbstractDevice(device_kind=platform, num_cores=None, platform=platform) if platform else None
        return AbstractMesh(sizes, AXES, axis_types=_AXIS_TYPES, abstract_device=device)

    def _refuse(self, devices: Sequence[jax.Device]) -> None:  # pyright: ignore[reportInvalidTypeForm]
        """Raises the error of too few devices, with a way to get more."""
        try:
            self.resolved(len(devices))
        except MeshError as error:
            why, fix = process.more_devices(self.least(), devices[0].platform)
            raise MeshError(f"{error}\n{Problem('devices', why, fix)}") from None

    def _check(self, num_devices: int) -> None:
        problems = Problems()
        for axis, size in self._every_size.items():
            if size == 0 or (size == -1 and axis not in AXES):
                problems.add(f"mesh.{axis}", f"{size} is not a size", "a size of 1 or more")
        free = [axis for axis, size in self.sizes.items() if size == -1]
        if len(free) > 1:
            problems.add(f"mesh.{', mesh.'.join(free)}", "only one size may be -1", "give the others a size")
        if not problems:
            self._check_product(num_devices, bool(free), problems)
        problems.raise_any(MeshError, f"mesh ({self}) does not fit {_count(num_devices)}:")

    def _check_product(self, num_devices: int, free: bool, problems: Problems) -> None:
        fixed = math.prod(size for size in self._every_size.values() if size != -1)
        if num_devices % fixed == 0 and (free or fixed == num_devices):
            return
        for axis, size in self._every_size.items():
            if size not in (-1, 1) and num_devices % (fixed // size) == 0:
                room = num_devices // (fixed // size)
                fits = _divisors(room) if free else str(room)
                problems.add(f"mesh.{axis}", _mismatch(num_devices, fixed), f"{axis}={fits} would fit")
        if not problems:
            fix = f"sizes that divide {num_devices}: {_divisors(num_devices)}"
            problems.add("mesh", _mismatch(num_devices, fixed), fix)

    def __str__(self) -> str:
        return describe_sizes(self._every_size)


def describe_sizes(sizes: dict[str, int]) -> str:
    """The axes larger than 1, as in `data=2, tensor=4`.

    >>> describe_sizes({"data": 2, "fsdp": 1, "tensor": 4})
    'data=2, tensor=4'
    """
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "one device"


def _count(num_devices: int) -> str:
    return "1 device" if num_devices == 1 else f"{num_devices} devices"


def _divisors(num_devices: int) -> str:
    """The divisors, as in `1, 2 or 4`."""
    sizes = [str(size) for size in range(1, num_devices + 1) if num_devices % size == 0]
    return f"{', '.join(sizes[:-1])} or {sizes[-1]}" if len(sizes) > 1 else sizes[0]


def _mismatch(num_devices: int, fixed: int) -> str:
    if fixed > num_devices:
        return f"the sizes multiply to {fixed}, more than the {_count(num_devices)} available"
    if num_devices % fixed:
        return f"the sizes multiply to {fixed}, which does not divide {num_devices}"
    return f"the sizes multiply to {fixed}, which leaves {num_devices - fixed} of {num_devices} devices idle"


def _arrange(devices: Sequence[jax.Device], inside: tuple[int, ...], across: tuple[int, ...]) -> np.ndarray:  # pyright: ignore[reportInvalidTypeForm]
    if devices[0].platform == "cpu":
        whole = tuple(i * a for i, a in zip(inside, across, strict=True))
        return np.asarray(devices).reshape(whole)
    if math.prod(across) > 1:
        by_host = devices[0].platform == "gpu" and len({device.slice_index for device in devices}) == 1
        slices: dict[int, list[jax.Device]] = defaultdict(list)  # pyright: ignore[reportInvalidTypeForm]
        for device in devices:
            slices[device.process_index if by_host else device.slice_index].append(device)
        return mesh_utils.create_hybrid_device_mesh(
            inside, across, _stages_outermost(slices, across),
            process_is_granule=by_host, should_sort_granules_by_key=False, allow_split_physical_axes=True,
        )  # fmt: skip
    return mesh_utils.create_device_mesh(inside, devices, allow_split_physical_axes=True)


def _stages_outermost(slices: dict[int, list[jax.Device]], across: Sequence[int]) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    """The devices of all slices, in the order of `slices_by_stage`.

    Raises:
      MeshError: there are not as many slices as the sizes say.
    """
    numbers = sorted(slices)
    if len(numbers) != math.prod(across):
        sizes = describe_sizes(dict(zip(AXES, across, strict=True)))
        what = f"the sizes multiply to {math.prod(across)}, and the devices are in {len(numbers)} slices"
        raise MeshError(f"mesh.dcn ({sizes}): {what}; of GPUs, each host is a slice")
    return [device for place in slices_by_stage(across).ravel() for device in slices[numbers[place]]]


def slices_by_stage(across: Sequence[int]) -> np.ndarray:
    """The number of each slice of a mesh across slices, where stages of a pipeline are outermost.

    Stages send least, so they are farthest from each other, and each has slices, or hosts, of its own.
    """
    stages = AXES.index("pipe")
    sizes = [*across]
    outermost = [sizes.pop(stages), *sizes]
    return np.moveaxis(np.arange(math.prod(across)).reshape(outermost), 0, stages)
