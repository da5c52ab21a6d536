"""The device mesh: seven named axes, sized by name, laid on whatever devices are here.

The axes stand in the order of the networks that they usually span, slow to fast. Every mesh has all seven,
so that a name is never unbound; an axis of size 1 carries nothing and appears in no sharding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import jax
import numpy as np
import pydantic
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshpar.config import Config
from meshpar.errors import MeshError, Problem, Problems
from meshpar.mesh import process

AXES = ("replica", "data", "fsdp", "pipe", "expert", "context", "tensor")
MAX_DEVICES = 2**20
_AXIS_TYPES = (AxisType.Auto,) * len(AXES)

_Size = Annotated[int, pydantic.Field(ge=-1, le=MAX_DEVICES)]


class AxisSizes(Config):
    """A size for each axis; what is not named has size 1."""

    replica: _Size = 1
    data: _Size = 1
    fsdp: _Size = 1
    pipe: _Size = 1
    expert: _Size = 1
    context: _Size = 1
    tensor: _Size = 1

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}


class MeshLayout(AxisSizes):
    """Sizes inside a slice (or host, or the whole machine), and across slices in `dcn`.

    One size may be -1: it takes the devices that the others leave. The size of an axis in the mesh is its
    size inside a slice times its size across slices.

    Raises:
      MeshError: the sizes do not multiply to the number of devices; the text lists those that would.

    >>> MeshLayout(data=-1, tensor=2).resolved(8)["data"]
    4
    """

    dcn: AxisSizes | None = None
    """Sizes across slices; default: there is one slice."""

    @property
    def _across(self) -> dict[str, int]:
        return (self.dcn or AxisSizes()).sizes

    def resolved(self, num_devices: int) -> dict[str, int]:
        """The size of every axis inside a slice, -1 filled in, for `num_devices` in all slices together."""
        across = math.prod(self._across.values())
        self._check(num_devices, across)
        fixed = math.prod(size for size in self.sizes.values() if size != -1)
        return {a: num_devices // across // fixed if s == -1 else s for a, s in self.sizes.items()}

    def requested(self) -> int | None:
        """The number of devices that the sizes multiply to; None if one of them is -1."""
        product = math.prod(self.sizes.values()) * math.prod(self._across.values())
        return product if product > 0 else None

    def least(self) -> int:
        """The number of devices that the sizes need; an axis of size -1 needs one."""
        return math.prod(size for size in (*self.sizes.values(), *self._across.values()) if size > 0)

    def build(self, devices: Sequence[jax.Device] | None = None) -> Mesh:  # pyright: ignore[reportInvalidTypeForm]
        """The mesh over `devices`, neighbours on fast axes near to each other in hardware.

        Default: all devices. A machine that has only its CPU simulates as many as the sizes ask for, if JAX has not
        started yet.
        """
        if devices is None:
            devices = process.devices(self.least())
            if len(devices) < self.least():
                self._refuse(devices)
        inside, across = self.resolved(len(devices)), self._across
        return Mesh(_arrange(devices, tuple(inside.values()), tuple(across.values())), AXES, _AXIS_TYPES)

    def abstract(self, num_devices: int | None = None) -> AbstractMesh:
        """The mesh without devices: enough to resolve, explain, and trace."""
        inside = self.resolved(num_devices or self.requested() or 1)
        sizes = tuple(inside[axis] * self._across[axis] for axis in AXES)
        return AbstractMesh(sizes, AXES, axis_types=_AXIS_TYPES)

    def _refuse(self, devices: Sequence[jax.Device]) -> None:  # pyright: ignore[reportInvalidTypeForm]
        """Raises what does not fit these devices, and how to have more."""
        try:
            self.resolved(len(devices))
        except MeshError as error:
            why, fix = process.more_devices(self.least(), devices[0].platform)
            raise MeshError(f"{error}\n{Problem('devices', why, fix)}") from None

    def _check(self, num_devices: int, across: int) -> None:
        problems, sizes = Problems(), self.sizes
        for axis, size in {**sizes, **{f"dcn.{a}": s for a, s in self._across.items()}}.items():
            if size == 0 or (size == -1 and axis not in sizes):
                problems.add(f"mesh.{axis}", f"{size} is not a size", "a size of 1 or more")
        free = [axis for axis, size in sizes.items() if size == -1]
        if len(free) > 1:
            problems.add(f"mesh.{', mesh.'.join(free)}", "only one size may be -1", "give the others a size")
        if not problems:
            self._check_product(num_devices, across, bool(free), problems)
        problems.raise_any(MeshError, f"mesh ({self}) does not fit {_count(num_devices)}:")

    def _check_product(self, num_devices: int, across: int, free: bool, problems: Problems) -> None:
        fixed = across * math.prod(s for s in self.sizes.values() if s != -1)
        if num_devices % fixed == 0 and (free or fixed == num_devices):
            return
        for axis, size in self.sizes.items():
            if size not in (-1, 1) and num_devices % (fixed // size) == 0:
                room = num_devices // (fixed // size)
                fits = [d for d in range(1, room + 1) if room % d == 0] if free else [room]
                problems.add(f"mesh.{axis}", self._why(num_devices, fixed), f"{axis}={_either(fits)} would fit")
        if not problems:
            fits = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
            problems.add("mesh", self._why(num_devices, fixed), f"sizes that divide {num_devices}: {_either(fits)}")

    def _why(self, num_devices: int, fixed: int) -> str:
        if fixed > num_devices:
            are = "is" if num_devices == 1 else "are"
            return f"the sizes multiply to {fixed}, more than the {_count(num_devices)} that {are} here"
        if num_devices % fixed:
            return f"the sizes multiply to {fixed}, which does not divide {num_devices}"
        return f"the sizes multiply to {fixed}, which leaves {num_devices - fixed} of {num_devices} devices idle"

    def __str__(self) -> str:
        return describe_sizes({**self.sizes, **{f"dcn.{a}": s for a, s in self._across.items()}})


def describe_sizes(sizes: dict[str, int]) -> str:
    """`data=2, tensor=4`: the axes that carry something.

    >>> describe_sizes({"data": 2, "fsdp": 1, "tensor": 4})
    'data=2, tensor=4'
    """
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "one device"


def _count(num_devices: int) -> str:
    return "1 device" if num_devices == 1 else f"{num_devices} devices"


def _either(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes[:-1])) + " or " * (len(sizes) > 1) + str(sizes[-1])


def _arrange(devices: Sequence[jax.Device], inside: tuple[int, ...], across: tuple[int, ...]) -> np.ndarray:  # pyright: ignore[reportInvalidTypeForm]
    if devices[0].platform == "cpu":
        whole = tuple(i * a for i, a in zip(inside, across, strict=True))
        return np.asarray(devices).reshape(whole)
    if math.prod(across) > 1:
        return mesh_utils.create_hybrid_device_mesh(inside, across, devices, allow_split_physical_axes=True)
    return mesh_utils.create_device_mesh(inside, devices, allow_split_physical_axes=True)
