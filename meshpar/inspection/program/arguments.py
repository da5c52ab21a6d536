"""Lists the arguments and outputs of a program: JAX's shapes and shardings, with the paths of the program's text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.stages import Compiled

from meshpar.inspection.program.flow import Flow, argument_path
from meshpar.tree import flatten_with_paths


@dataclass(frozen=True)
class Passed:
    """An argument or output of a compiled program.

    Args:
      path: of an argument, such as `state.params.w`; of an output, such as `output 0.w`.
      shape: the shape of the whole array.
      num_bytes: the size of one device's part.
      sharding: the sharding that JAX compiled.
      donated: whether the program may write over the argument; False for an output.
      number: its position among the program's arguments or outputs.
    """

    path: str
    shape: tuple[int, ...]
    num_bytes: int
    sharding: Any
    donated: bool
    number: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_replicated(self) -> bool:
        """Whether there are several devices and each holds the whole array."""
        return len(self.sharding.device_set) > 1 and self.sharding.is_fully_replicated

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that shard it; empty if the sharding names no axes."""
        spec = getattr(self.sharding, "spec", ())
        entries = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
        return tuple(axis for entry in entries for axis in entry if self.sharding.mesh.shape[axis] > 1)


def arguments(compiled: Compiled, flow: Flow) -> list[Passed]:
    """The arguments of the program; JAX drops arguments that nothing reads."""
    leaves = jax.tree.leaves(compiled.args_info)
    shardings = jax.tree.leaves(compiled.input_shardings, is_leaf=lambda leaf: leaf is None)
    used = [pair for pair in zip(leaves, shardings, strict=True) if pair[1] is not None]
    if len(used) != len(flow.arguments):
        return []
    found = []
    for number, (leaf, sharding) in enumerate(used):
        one = flow.arguments[number]
        found.append(Passed(argument_path(one), leaf.shape, one.arrays[0].num_bytes, sharding, leaf.donated, number))
    return found


def outputs(compiled: Compiled) -> list[Passed]:
    """The outputs of the program."""
    leaves = flatten_with_paths(compiled.out_info)
    shardings = jax.tree.leaves(compiled.output_shardings)
    found = []
    for number, ((path, leaf), sharding) in enumerate(zip(leaves.items(), shardings, strict=True)):
        num_bytes = math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        found.append(Passed(f"output {path}".rstrip(), leaf.shape, num_bytes, sharding, False, number))
    return found
