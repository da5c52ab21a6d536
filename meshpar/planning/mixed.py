"""A machine whose hosts have different chips, such as `h100:4x8+a100:4x8`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshpar.cost.flops import ProductSizes
from meshpar.cost.touched import Touch
from meshpar.cost.traced import Collective
from meshpar.errors import MeshError
from meshpar.mesh import targets
from meshpar.planning.machine import Figure, Machine, Sizes, StatedMachine, hosts
from meshpar.sharding.resolve import AnyMesh


@dataclass(frozen=True)
class MixedMachine:
    """Hosts of several kinds, whose devices run one program: the slowest decides, and the one with the least memory.

    Only the stages of a pipeline can have different times, where the devices of a stage are all of one kind.

    Args:
      kinds: for each kind, the machine that has only such hosts.
      num_hosts: the number of hosts of each kind, in the order of the devices.
    """

    text: str
    kinds: tuple[StatedMachine, ...]
    num_hosts: tuple[int, ...]

    @classmethod
    def of(cls, text: str) -> MixedMachine:
        """Reads machines that are joined by `+`.

        Raises:
          MeshError: one of them is unknown, or they cannot run one program.
        """
        parts = [targets.parse(part) for part in text.split("+")]
        if any(part.is_tpu for part in parts):
            raise MeshError(f"--target {text}: TPUs of different kinds cannot run one program; join hosts of GPUs")
        per_host = {part.shape[-1] for part in parts}
        if len(per_host) > 1:
            sizes = " and ".join(map(str, sorted(per_host)))
            raise MeshError(f"--target {text}: hosts have {sizes} GPUs; all must have equally many")
        num_devices = sum(part.num_chips for part in parts)
        kinds = tuple(replace(StatedMachine.of(part), num_devices=num_devices) for part in parts)
        return cls(text, kinds, tuple(part.num_chips // part.shape[-1] for part in parts))

    @property
    def platform(self) -> str:
        return self.kinds[0].platform

    @property
    def num_devices(self) -> int:
        return self.kinds[0].num_devices

    @property
    def per_host(self) -> int:
        return self.kinds[0].per_host

    @property
    def memory_bytes(self) -> float:
        return min(kind.memory_bytes for kind in self.kinds)

    @property
    def overlaps(self) -> bool:
        return True

    @property
    def shares_cores(self) -> bool:
        return False

    @property
    def targets(self) -> Sequence[str]:
        """For each kind of chip, a machine of as many hosts: no compiler knows several kinds in one."""
        return [f"{kind.text.split(':')[0]}:{sum(self.num_hosts)}x{self.per_host}" for kind in self.kinds]

    @property
    def figures(self) -> Sequence[Figure]:
        """The figures of each kind."""

        def of(index: int, figure: Figure) -> Figure:
            def scaled(factor: float) -> MixedMachine:
                changed = figure.scaled(factor)
                assert isinstance(changed, StatedMachine)
                return replace(self, kinds=(*self.kinds[:index], changed, *self.kinds[index + 1 :]))

            return Figure(f"{figure.name} of {self.kinds[index].text}", figure.value, scaled)

        return [of(index, figure) for index, kind in enumerate(self.kinds) for figure in kind.figures]

    def product_s(self, one: ProductSizes) -> float:
        """Seconds of a matrix product, on the slowest device."""
        return max(kind.product_s(one) for kind in self.kinds)

    def touch_s(self, one: Touch) -> float:
        """Seconds of an operation beside products and collectives, on the slowest device."""
        return max(kind.touch_s(one) for kind in self.kinds)

    def new_memory_s(self, num_bytes: float) -> float:
        """Seconds of the memory that each step takes from the system, on the slowest device."""
        return max(kind.new_memory_s(num_bytes) for kind in self.kinds)

    def collective_s(self, one: Collective, mesh: AnyMesh, dcn: Sizes = ()) -> float:
        """Seconds of all runs of a collective in a step, over the slowest links."""
        return max(kind.collective_s(one, mesh, dcn) for kind in self.kinds)

    def stages(self, mesh: AnyMesh, dcn: Sizes = ()) -> Sequence[Machine]:
        """For each stage of a pipeline, the kind of its devices; the machine with several kinds, if they have several.

        >>> from meshpar.mesh.layout import MeshLayout
        >>> mixed = MixedMachine.of("h100:1x8+a100:1x8")
        >>> [stage.text for stage in mixed.stages(MeshLayout(data=8, pipe=2).abstract(), (("pipe", 2),))]
        ['h100:1x8', 'a100:1x8']
        """
        host_of = hosts(mesh.shape_tuple, dcn, self.per_host)
        by_stage = np.moveaxis(host_of, list(mesh.shape).index("pipe"), 0).reshape(mesh.shape["pipe"], -1)
        kind_of = np.repeat(np.arange(len(self.kinds)), self.num_hosts)
        found = [tuple(sorted({*kind_of[stage].tolist()})) for stage in by_stage]
        machines = {several: self._only(several) for several in found}
        return [machines[several] for several in found]

    def _only(self, several: tuple[int, ...]) -> Machine:
        if len(several) == 1:
            return self.kinds[several[0]]
        kinds = tuple(self.kinds[index] for index in several)
        return replace(self, kinds=kinds, num_hosts=tuple(self.num_hosts[index] for index in several))
