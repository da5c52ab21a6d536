"""Measures the machine that a plan is for: products, elementwise operations and collectives, by size.

All programs of a kind run in turn, and a time is the median of its rounds, so that other jobs slow all of them alike.
Simulated devices share the cores of one machine. Their times are the CPU seconds of the whole process over the number
of cores: how long the cores are busy, whatever else runs on the machine.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshpar.planning.measured import KINDS, CollectiveTimes, Kind, MeasuredMachine, Point, group_sizes

GROUPS = "groups"
AXIS = "x"
REPEATS = 32
"""How often a program repeats its operation, so that starting the program costs little."""
SIDES = (16, 64, 128, 256, 512)
"""Rows and columns of the matrices of a product."""
BYTES = (2**10, 2**14, 2**17, 2**20, 2**22)
"""Bytes of a buffer."""
Program = Callable[[], Any]


def calibrate(sides: Iterable[int] = SIDES, sizes: Iterable[int] = BYTES, num_rounds: int = 7) -> MeasuredMachine:
    """Measures all devices of this process.

    Args:
      sides: of the matrices of products.
      sizes: bytes of the buffers of elementwise operations and collectives.
    """
    devices = jax.devices()
    platform: Any = devices[0].platform
    clock = _cpu_s if platform == "cpu" else time.perf_counter
    alone = _mesh(1)
    loop_s = _times({4.0: _program(_scaled, alone, 1)}, num_rounds, clock)[0].seconds
    times = partial(_times, num_rounds=num_rounds, clock=clock, loop_s=loop_s)
    products = {2.0 * side**3: _program(_product, alone, side * side) for side in sides}
    elementwise = {2.0 * size: _program(_scaled, alone, size // 4) for size in sizes}
    expensive = {2.0 * size: _program(_sigmoid, alone, size // 4) for size in sizes}
    collectives: list[CollectiveTimes] = []
    for group_size in group_sizes(len(devices)):
        mesh = _mesh(group_size)
        for kind in KINDS:
            programs = {}
            for size in sizes:
                floats = -(-size // (4 * group_size)) * group_size
                programs[4.0 * floats] = _collective(kind, mesh, floats)
            collectives.append(CollectiveTimes(kind=kind, group_size=group_size, times=times(programs)))
    return MeasuredMachine(
        device=devices[0].device_kind,
        num_devices=len(devices),
        memory_bytes=_memory_bytes(),
        platform=platform,
        products=times(products),
        elementwise=times(elementwise),
        expensive=times(expensive),
        collectives=tuple(collectives),
    )


def _cpu_s() -> float:
    return time.process_time() / (os.cpu_count() or 1)


def _times(
    programs: Mapping[float, Program], num_rounds: int, clock: Callable[[], float], loop_s: float = 0.0
) -> tuple[Point, ...]:
    """The median seconds of one operation of each program.

    Args:
      loop_s: of a turn of the loop that repeats it, which is no part of the operation.
    """
    found: dict[float, list[float]] = {size: [] for size in programs}
    for _ in range(num_rounds):
        for size, program in programs.items():
            start = clock()
            jax.block_until_ready(program())
            found[size].append((clock() - start) / REPEATS)
    medians = {size: statistics.median(times) for size, times in sorted(found.items())}
    return tuple(Point(size=size, seconds=max(median - loop_s, median / 10)) for size, median in medians.items())


def _mesh(group_size: int) -> Mesh:
    groups = jax.device_count() // group_size
    return jax.make_mesh((groups, group_size), (GROUPS, AXIS), axis_types=(AxisType.Auto,) * 2)


def _program(body: Callable[[jax.Array], jax.Array], mesh: Mesh, num_floats: int) -> Program:
    """A compiled program in which each device repeats an operation on floats of its own."""

    def repeated(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, REPEATS, lambda _, x: body(x), x[0])[None]

    spec = PartitionSpec((GROUPS, AXIS))
    struct = jax.ShapeDtypeStruct((jax.device_count(), num_floats), jnp.float32, sharding=NamedSharding(mesh, spec))
    ones = jax.jit(lambda: jnp.ones(struct.shape, struct.dtype), out_shardings=struct.sharding)
    region = jax.shard_map(repeated, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled = jax.jit(region).lower(struct).compile()
    x = ones()
    jax.block_until_ready(compiled(x))
    return lambda: compiled(x)


def _product(x: jax.Array) -> jax.Array:
    side = round(x.size**0.5)
    square = x.reshape(side, side)
    return (square @ square * (1 / side)).reshape(-1)


def _scaled(x: jax.Array) -> jax.Array:
    return x * 0.999 + 0.001


def _sigmoid(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(x)


def _collective(kind: Kind, mesh: Mesh, num_floats: int) -> Program:
    """A program that repeats a collective whose whole buffer has so many floats."""
    size = mesh.shape[AXIS]
    shift = [(i, (i + 1) % size) for i in range(size)]
    bodies: dict[Kind, Callable[[jax.Array], jax.Array]] = {
        "all_gather": lambda x: x + lax.all_gather(x, AXIS, tiled=True)[: x.size],
        "reduce_scatter": lambda x: x.at[: x.size // size].set(lax.psum_scatter(x, AXIS, tiled=True)),
        "all_reduce": lambda x: lax.psum(x, AXIS),
        "all_to_all": partial(lax.all_to_all, axis_name=AXIS, split_axis=0, concat_axis=0, tiled=True),
        "collective_permute": partial(lax.ppermute, axis_name=AXIS, perm=shift),
    }
    return _program(bodies[kind], mesh, num_floats // size if kind == "all_gather" else num_floats)


def _memory_bytes() -> int:
    """Memory of a device; simulated devices share that of the host."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.device_count()
