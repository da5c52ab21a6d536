"""Parts of a state: the shards of one process, how they are sent to another process, and which process needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from meshpar.errors import CheckpointError
from meshpar.train.program import on_each_device

AXIS = "device"
Part = dict[str, list[np.ndarray]]
"""Path -> the shards of one process, in the order of its devices and without repetitions."""


@dataclass(frozen=True)
class Holders:
    """Records which process has which part, and on which host.

    Args:
      parts: the part of each process, named by the first process that has the same one.
      hosts: the host of each process.

    Four processes on two hosts: each has a neighbour two processes on. When the second host is lost, its parts are on
    the first:

    >>> holders = Holders([0, 1, 2, 3], ["a", "a", "b", "b"])
    >>> holders.distance, holders.writes(3)
    (2, {1, 3})
    >>> holders.senders([{0, 1, 2, 3}, {0, 1, 2, 3}, set(), set()])
    {2: 0, 3: 1}
    """

    parts: Sequence[int]
    hosts: Sequence[str]

    @cached_property
    def distance(self) -> int:
        """The distance from each process to the process that receives its part, which is on another host.

        It is 0 if nothing has to be sent, because there is one host, or because every part is on several hosts.

        Raises:
          CheckpointError: hosts have different numbers of processes.
        """
        places = set(zip(self.parts, self.hosts, strict=True))
        is_on_several = all(len([part for part, _ in places if part == own]) > 1 for own in self.parts)
        if is_on_several or len(set(self.hosts)) == 1:
            return 0
        for distance in range(1, len(self.hosts)):
            further = [*self.hosts[distance:], *self.hosts[:distance]]
            if all(host != other for host, other in zip(self.hosts, further, strict=True)):
                return distance
        raise CheckpointError("checkpoints.memory_every: needs the same number of processes on every host")

    def writes(self, process: int) -> set[int]:
        """The parts that a process writes: its own and the received one, unless an earlier process of its host does."""
        before = (other for other in range(process) if self.hosts[other] == self.hosts[process])
        return self._has(process).difference(*map(self._has, before))

    def senders(self, held: Sequence[set[int]]) -> dict[int, int] | None:
        """Process whose host does not hold its part -> the process that sends it; None if a part is lost.

        Args:
          held: for each process, the parts that are on its host.
        """
        found: dict[int, int] = {}
        for process, part in enumerate(self.parts):
            if part in held[process]:
                continue
            free = (other for other, there in enumerate(held) if part in there and other not in found.values())
            sender = next(free, None)
            if sender is None:
                return None
            found[process] = sender
        return found

    def _has(self, process: int) -> set[int]:
        return {self.parts[process], self.parts[process - self.distance]}


@dataclass(frozen=True)
class Layout:
    """Which shards of a state each process has.

    Args:
      structs: path -> struct, sharded over all devices.
    """

    structs: Mapping[str, jax.ShapeDtypeStruct]

    @cached_property
    def mesh(self) -> Mesh:
        """All devices, sorted by process."""
        devices = next(iter(self.structs.values())).sharding.device_set  # pyright: ignore
        return Mesh(sorted(devices, key=lambda device: (device.process_index, device.id)), AXIS)

    @cached_property
    def parts(self) -> list[int]:
        """The part of each process: see `Holders`."""
        regions = [[self._of(path, process) for path in self.structs] for process in range(jax.process_count())]
        return [regions.index(own) for own in regions]

    @cached_property
    def regions(self) -> dict[str, list[str]]:
        """Path -> the region of the array that each device holds, as text."""
        return {
            path: [_region(struct, device) for device in self.mesh.devices] for path, struct in self.structs.items()
        }

    def own(self, arrays: Mapping[str, jax.Array]) -> Part:
        """The part of this process, copied to the host."""
        process = jax.process_index()
        return {
            path: [np.array(jax.device_get(x)) for x in self._distinct(path, process, self._shards(arrays[path]))]
            for path in self.structs
        }

    def sent(self, arrays: Mapping[str, jax.Array], distance: int) -> Part:
        """Returns the part of the process that is `distance` before this one. All processes call it.

        Communication: a collective permute for each array whose shards differ between processes.
        """
        num = jax.process_count()
        to = {process: (process + distance) % num for process in range(num)}
        sender = (jax.process_index() - distance) % num
        found: Part = {}
        for path in self.structs:
            shards = self._shards(arrays[path])
            is_same = all(self._of(path, process) == self._of(path, 0) for process in range(num))
            got = jax.device_get(shards) if is_same else self._permuted(shards, to)
            found[path] = [np.array(x) for x in self._distinct(path, sender, got)]
        return found

    def received(self, outgoing: Part | None, part: int, to: Mapping[int, int]) -> Part:
        """The part that this process lost. All processes call it.

        Args:
          outgoing: the part that this process sends; None if it sends none.
          part: the part that it gets.
          to: process -> the process to which it sends.

        Communication: a collective permute for each array; processes that send no part send zeros.
        """
        found: Part = {}
        for path, struct in self.structs.items():
            zeros = [np.zeros(self._shape(path), struct.dtype)] * self._num_local
            to_whom = to.get(jax.process_index())
            shards = zeros if outgoing is None else self._expanded(path, outgoing[path], to_whom)
            found[path] = self._distinct(path, part, self._permuted(shards, to))
        return found

    def placed(self, part: Part) -> dict[str, jax.Array]:
        """The state, from the part of each process."""
        found = {}
        for path, struct in self.structs.items():
            sharding: Any = struct.sharding
            shards = [
                jax.device_put(x, SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
                for x, device in zip(self._expanded(path, part[path]), self._local_devices, strict=True)
            ]
            found[path] = jax.make_array_from_single_device_arrays(struct.shape, sharding, shards)
        return found

    def parsed(self, content: memoryview, part: int) -> Part:
        """Parses the bytes of a part: its shards, one after the other."""
        found: Part = {}
        at = 0
        for path, struct in self.structs.items():
            found[path] = []
            for _ in self._distinct(path, part, range(self._num_local)):
                count = int(np.prod(self._shape(path)))
                found[path].append(np.frombuffer(content, struct.dtype, count, at).reshape(self._shape(path)))
                at += count * struct.dtype.itemsize
        return found

    @property
    def _num_local(self) -> int:
        return self.mesh.size // jax.process_count()

    @property
    def _local_devices(self) -> list[Any]:
        first = jax.process_index() * self._num_local
        return list(self.mesh.devices)[first : first + self._num_local]

    def _of(self, path: str, process: int) -> list[str]:
        """The regions of an array that a process holds."""
        return self.regions[path][process * self._num_local :][: self._num_local]

    def _shape(self, path: str) -> tuple[int, ...]:
        sharding: Any = self.structs[path].sharding
        return sharding.shard_shape(self.structs[path].shape)

    def _shards(self, x: jax.Array) -> list[jax.Array]:
        """The shards of this process, in the order of its devices."""
        by_device = {shard.device: shard.data for shard in x.addressable_shards}
        return [by_device[device] for device in self._local_devices]

    def _distinct(self, path: str, process: int, shards: Sequence[Any]) -> list[Any]:
        """The shards of a process without repetitions."""
        regions = self._of(path, process)
        return [x for place, x in enumerate(shards) if regions.index(regions[place]) == place]

    def _expanded(self, path: str, shards: Sequence[np.ndarray], process: int | None = None) -> list[np.ndarray]:
        """The shards of a process with repetitions: one for each device."""
        regions = self._of(path, jax.process_index() if process is None else process)
        distinct = list(dict.fromkeys(regions))
        return [shards[distinct.index(region)] for region in regions]

    def _permuted(self, shards: Sequence[Any], to: Mapping[int, int]) -> list[np.ndarray]:
        """Sends the shard of each device to the device at the same place of another process; others get zeros."""
        num = self._num_local
        pairs = tuple((a * num + place, b * num + place) for a, b in sorted(to.items()) for place in range(num))
        lifted = [x if x.ndim else x[None] for x in shards]
        placed = [jax.device_put(x, device) for x, device in zip(lifted, self._local_devices, strict=True)]
        length, *others = placed[0].shape
        sharding = NamedSharding(self.mesh, PartitionSpec(AXIS))
        whole = jax.make_array_from_single_device_arrays((self.mesh.size * length, *others), sharding, placed)
        got = jax.device_get(self._shards(_permutation(self.mesh, pairs)(whole)))
        return [x.reshape(shards[0].shape) for x in got]


@cache
def _permutation(mesh: Mesh, pairs: tuple[tuple[int, int], ...]) -> Any:
    spec = PartitionSpec(AXIS)
    return jax.jit(on_each_device(lambda x: lax.ppermute(x, AXIS, pairs), mesh, spec, spec))


def _region(struct: jax.ShapeDtypeStruct, device: Any) -> str:
    sharding: Any = struct.sharding
    index = sharding.devices_indices_map(struct.shape)[device]
    return str([dim.indices(size)[:2] for dim, size in zip(index, struct.shape, strict=True)])
