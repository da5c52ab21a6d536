"""Estimates the memory that a traced program needs at its peak, without compiling it.

A value is held from the equation that computes it to the last that reads it. Elementwise operations whose result is
read once are computed where it is read, as compilers fuse them: they hold nothing, and what they read is held until
then. A loop holds its results and what one turn of its body needs. Compilers order operations as they like, so this is
an estimate; `inspection.program.memory` reads what a compiled program needs.
"""

from __future__ import annotations

from collections import defaultdict

from jax.extend.core import ClosedJaxpr, Jaxpr

from meshpar.cost.flat import Flat, Operation, bodies, size_of


def peak_bytes(program: ClosedJaxpr) -> int:
    """Bytes that a program holds at most on a device, in addition to its arguments.

    Args:
      program: the result of `jax.make_jaxpr`. Only manual regions count; without any, the program of one device.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from meshpar.mesh.layout import MeshLayout
      >>> mesh = MeshLayout(data=4).abstract()
      >>> twice = jax.shard_map(lambda x: x @ x @ x, mesh=mesh, in_specs=P(), out_specs=P())
      >>> peak_bytes(jax.make_jaxpr(twice)(jnp.ones((8, 8), jnp.float32)))
      512
    """
    return max(map(_peak, bodies(program)))


def _peak(jaxpr: Jaxpr) -> int:
    flat = Flat(jaxpr)
    now = most = 0
    freed: dict[int, int] = defaultdict(int)
    for position, operation in enumerate(flat.operations):
        for value in operation.writes:
            size = 0 if value in flat.fused else flat.sizes[value]
            now += size
            freed[flat.last_reads.get(value, position)] += size
        most = max(most, now + _needs(operation))
        now -= freed[position]
    return most


def _needs(operation: Operation) -> int:
    """Bytes that an operation holds only while it runs, in addition to its results."""
    needs = max(map(_peak, operation.inside), default=0)
    if operation.name == "cond":  # its results are those of the branch
        return max(0, needs - sum(map(size_of, operation.equation.outvars)))
    return needs
