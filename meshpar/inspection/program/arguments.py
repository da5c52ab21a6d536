"""What a program takes and gives: JAX's knowledge of the arrays, by the paths that the program's text knows them by."""

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
      path: `state.params.w`; an output's place among the outputs, `output 0.w`.
      shape: of the whole array.
      num_bytes: of the part that one device holds.
      sharding: as JAX compiled it.
      donated: whether the program may write over it; an output is not.
      number: among those that are left of its kind in the program.
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
        """Whether each of several devices holds the whole array."""
        return len(self.sharding.device_set) > 1 and self.sharding.is_fully_replicated

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that shard it; none where JAX names none."""
        spec = getattr(self.sharding, "spec", ())
        entries = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
        return tuple(axis for entry in entries for axis in entry if self.sharding.mesh.shape[axis] > 1)


def arguments(compiled: Compiled, flow: Flow) -> list[Passed]:
    """The arguments that the program takes; JAX drops those that nothing reads."""
    leaves = jax.tree.leaves(compiled.args_info)
    shardings = jax.tree.leaves(compiled.input_shardings, is_leaf=lambda leaf: leaf is None)
    kept = [pair for pair in zip(leaves, shardings, strict=True) if pair[1] is not None]
    if len(kept) != len(flow.arguments):
        return []
    return [
        Passed(
            argument_path(flow.arguments[number]), leaf.shape, flow.arguments[number].arrays[0].num_bytes,
            sharding, leaf.donated, number,
        )
        for number, (leaf, sharding) in enumerate(kept)
    ]  # fmt: skip


def outputs(compiled: Compiled) -> list[Passed]:
    """What it gives."""
    leaves = flatten_with_paths(compiled.out_info)
    shardings = jax.tree.leaves(compiled.output_shardings)
    return [
        Passed(f"output {path}".rstrip(), leaf.shape, _local_bytes(leaf, sharding), sharding, False, number)
        for number, ((path, leaf), sharding) in enumerate(zip(leaves.items(), shardings, strict=True))
    ]


def _local_bytes(leaf: Any, sharding: Any) -> int:
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
