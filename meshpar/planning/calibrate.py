"""Measures the machine that a plan is for: products, elementwise operations and collectives, by size.

All programs of a kind run in turn, and a time is the median of its rounds, so that other jobs slow all of them alike.
Simulated devices share the cores of one machine. Their times are the CPU seconds of the whole process over the number
of cores that they use: how long these are busy, whatever else runs on the machine.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshpar.cost.touched import TRANSPOSE
from meshpar.errors import ConfigError
from meshpar.planning.measured import KINDS, CollectiveTimes, FunctionTime, Kind, MeasuredMachine, Point, group_sizes

GROUPS = "groups"
AXIS = "x"
MOST_IN_ITERATION = 5
"""The most operations in an iteration of a loop: XLA:CPU queues independent operations of longer programs."""
MOST_BYTES = 2**21
"""The most bytes of the operands in an iteration, but for two operations."""
WORKING_SET = 2**21
"""Bytes of the arrays of which an elementwise operation reads and writes a part in turn: a step's arrays are not all in
a core's cache either."""
FLOATS_MORE = 16
"""By how many elements the arrays of an iteration differ."""
REPEATS = 32
"""How often a program repeats its operation, so that starting the program costs little."""
SIDES = (16, 32, 64, 128, 256, 512)
"""Rows and columns of the matrices of a product."""
BYTES = (2**10, 2**12, 2**14, 2**17, 2**20, 2**21, 2**22)
"""Bytes of a buffer."""
MEMORY = (2**17, 2**20, 2**22, 2**24, 2**25, 2**26)
"""Bytes of memory that a program takes."""
RUNS_BEFORE = 4
"""How often a program runs before the C library keeps all memory that it will keep."""
FUNCTION_FLOATS = 2**14
"""Elements of which functions are computed."""
TRANSPOSED_SIDE = 512
"""Rows and columns of the matrix that is transposed: more than a core's cache holds beside those of other devices."""
LEAST_S = 1e-9
"""The least time that is written, for differences that are smaller than their noise."""
FUNCTIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "div": lambda x: 0.5 / (x * 0.999 + 0.001),
    "exp": lambda x: lax.exp(x * -0.999 + 0.001),
    "integer_pow": lambda x: lax.integer_pow(x * 0.999 + 0.001, 3),
    "log": lambda x: 1.0 + lax.log(x * 0.999 + 0.001),
    "logistic": lambda x: lax.logistic(x * 0.999 + 0.001),
    "pow": lambda x: lax.pow(x * 0.999 + 0.001, 0.7),
    "rsqrt": lambda x: lax.rsqrt(x * 0.999 + 0.001),
    "sqrt": lambda x: lax.sqrt(x * 0.999 + 0.001),
    "tanh": lambda x: lax.tanh(x * 0.999 + 0.001),
}
"""Function -> an operation that computes it, and reads and writes as much as a sum."""
Program = Callable[[], Any]
Arrays = list[jax.Array]
Key = TypeVar("Key")


def calibrate(
    sides: Iterable[int] = SIDES,
    sizes: Iterable[int] = BYTES,
    memory_sizes: Iterable[int] = MEMORY,
    num_rounds: int = 7,
) -> MeasuredMachine:
    """Measures all devices of this process.

    Args:
      sides: of the matrices of products.
      sizes: bytes of the buffers of elementwise operations and collectives.
      memory_sizes: bytes that programs take from the system.

    Raises:
      ConfigError: the devices are no CPUs.
    """
    devices = jax.devices()
    platform: Any = devices[0].platform
    if platform != "cpu":
        raise ConfigError(f"these programs are too small for a {devices[0].device_kind}: use calibrate_chip")
    sums = {(2.0 * size, n): _streaming(size // 4, count=n) for size in sizes for n in (1, _several(size))}
    elementwise, loop_s = _differences(sums, num_rounds)
    chains = {
        (2.0 * side**3, n): _program(partial(_products, count=n), _mesh(1), side * side)
        for side in sides
        for n in (1, _several(8 * side * side))
    }
    products, _ = _differences(chains, num_rounds)
    times = partial(_times, num_rounds=num_rounds, loop_s=loop_s)
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
        shares_cores=len(devices) > _num_cores(),
        products=products,
        elementwise=elementwise,
        functions=(
            *_function_times(FUNCTIONS, FUNCTION_FLOATS, num_rounds),
            *_function_times({TRANSPOSE: _transposed}, TRANSPOSED_SIDE**2, num_rounds),
        ),
        new_memory=_new_memory(memory_sizes, num_rounds),
        collectives=tuple(collectives),
    )


def _cpu_s() -> float:
    return time.process_time() / min(_num_cores(), jax.device_count())


def _num_cores() -> int:
    return os.cpu_count() or 1


def _medians(programs: Mapping[Key, Program], num_rounds: int, num_before: int = 0) -> dict[Key, float]:
    """Median seconds of programs that run in turn, from the largest down: after it the smallest would fill caches anew.

    Args:
      num_before: how often each runs before it is timed.
    """
    found: dict[Key, list[float]] = {key: [] for key in programs}
    for _ in range(num_rounds):
        for key, program in sorted(programs.items(), key=itemgetter(0), reverse=True):
            for _ in range(num_before):
                jax.block_until_ready(program())
            start = _cpu_s()
            jax.block_until_ready(program())
            found[key].append(_cpu_s() - start)
    return {key: statistics.median(times) for key, times in found.items()}


def _several(num_bytes: int) -> int:
    """The number of operations in an iteration of a loop, by the bytes of an operand."""
    return min(MOST_IN_ITERATION, max(2, MOST_BYTES // num_bytes))


def _differences(programs: Mapping[tuple[float, int], Program], num_rounds: int) -> tuple[tuple[Point, ...], float]:
    """Seconds of an operation by size, and of an iteration of the loop that repeats the smallest one, without it.

    An iteration with several operations takes longer than one with a single operation by the time of operations alone.

    Args:
      programs: (size, number of operations in an iteration) -> program; two numbers for each size.
    """
    iteration_s = {key: total / REPEATS for key, total in _medians(programs, num_rounds).items()}
    points = []
    for size, count in sorted(programs):
        if count > 1:
            seconds = (iteration_s[size, count] - iteration_s[size, 1]) / (count - 1)
            points.append((size, max(seconds, LEAST_S)))
    found = _rising(points)
    return found, max(0.0, iteration_s[found[0].size, 1] - found[0].seconds)


def _rising(points: Iterable[tuple[float, float]]) -> tuple[Point, ...]:
    """The times by size. A larger size takes no less, and other work on the machine makes times only longer."""
    sizes, seconds = zip(*sorted(points), strict=True)
    least = np.minimum.accumulate(seconds[::-1])[::-1].tolist()
    return tuple(Point(size=size, seconds=one) for size, one in zip(sizes, least, strict=True))


def _times(programs: Mapping[float, Program], num_rounds: int, loop_s: float) -> tuple[Point, ...]:
    """The median seconds of one operation of each program.

    Args:
      loop_s: seconds of an iteration of the loop that repeats the operation, without the operation.
    """
    medians = _medians(programs, num_rounds)
    each = {size: total / REPEATS for size, total in medians.items()}
    return _rising((size, max(one - loop_s, one / 10)) for size, one in each.items())


def _function_times(
    functions: Mapping[str, Callable[[jax.Array], jax.Array]],
    num_floats: int,
    num_rounds: int,
) -> tuple[FunctionTime, ...]:
    """Seconds of a function of one element, beyond those of a sum."""
    alone = _mesh(1)
    programs = {name: _program(function, alone, num_floats) for name, function in functions.items()}
    medians = _medians({"": _program(_scaled, alone, num_floats), **programs}, num_rounds)
    least = medians[""] / 10
    each = {name: max(medians[name] - medians[""], least) / REPEATS / num_floats for name in programs}
    return tuple(FunctionTime.model_validate({"name": name, "seconds": seconds}) for name, seconds in each.items())


def _new_memory(sizes: Iterable[int], num_rounds: int) -> tuple[Point, ...]:
    """Seconds of taking memory from the system: one program writes to a temporary array, another one to a given array.

    Only later runs count: the C library keeps memory that the first ones took.
    """
    programs: dict[tuple[float, bool], Program] = {}
    for size in sizes:
        for is_new in (False, True):
            programs[float(size), is_new] = _writing(size // 4, is_new)
    medians = _medians(programs, num_rounds, num_before=RUNS_BEFORE)
    found = {size: medians[size, True] - medians[size, False] for size, is_new in medians if is_new}
    return _rising((size, max(seconds, LEAST_S)) for size, seconds in found.items())


def _writing(num_floats: int, is_new: bool) -> Program:
    """A program that writes to a temporary array, or to an array that it is given."""

    def repeated(x: jax.Array, given: jax.Array) -> jax.Array:
        last = lax.fori_loop(0, 2, lambda _, x: _scaled(x), _scaled(x))
        return last[:, :1] if is_new else last

    x, given = _ones(_mesh(1), num_floats), _ones(_mesh(1), num_floats)
    donated = () if is_new else (1,)
    compiled = jax.jit(repeated, donate_argnums=donated, keep_unused=True).lower(x, given).compile()

    def run() -> Any:
        nonlocal given
        result = compiled(x, given)
        if not is_new:
            given = result
        return result

    return run


def _mesh(group_size: int) -> Mesh:
    groups = jax.device_count() // group_size
    return jax.make_mesh((groups, group_size), (GROUPS, AXIS), axis_types=(AxisType.Auto,) * 2)


def _streaming(num_floats: int, count: int) -> Program:
    """A compiled program in which each device repeats elementwise operations, each on parts of its own arrays in turn.

    Args:
      num_floats: of a part.
      count: number of operations in each iteration, whose sizes differ so that compilers do not fuse them.
    """
    lengths = [num_floats + FLOATS_MORE * index for index in range(count)]
    num_parts = min(REPEATS, max(1, WORKING_SET // (8 * num_floats)))

    def repeated(read: Arrays, written: Arrays) -> Arrays:
        def iteration(index: jax.Array, written: Arrays) -> Arrays:
            part = index % num_parts
            results = [_scaled(lax.dynamic_index_in_dim(one, part, axis=1)) for one in read]
            pairs = zip(written, results, strict=True)
            return [lax.dynamic_update_slice_in_dim(one, result, part, axis=1) for one, result in pairs]

        return lax.fori_loop(0, REPEATS, iteration, written)

    read, written = ([_ones(_mesh(1), num_parts, length) for length in lengths] for _ in range(2))
    compiled = jax.jit(_on_devices(repeated, _mesh(1)), donate_argnums=1).lower(read, written).compile()

    def run() -> Any:
        nonlocal written
        written = compiled(read, written)
        return written

    jax.block_until_ready(run())
    return run


def _program(body: Callable[[jax.Array], jax.Array], mesh: Mesh, num_floats: int) -> Program:
    """A compiled program in which each device repeats an operation on floats of its own."""

    def repeated(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, REPEATS, lambda _, array: body(array), x[0])[None]

    x = _ones(mesh, num_floats)
    compiled = jax.jit(_on_devices(repeated, mesh)).lower(x).compile()
    jax.block_until_ready(compiled(x))
    return lambda: compiled(x)


def _ones(mesh: Mesh, *shape: int) -> jax.Array:
    """Ones of this shape on each device, in [devices, *shape]."""
    sharding = NamedSharding(mesh, PartitionSpec((GROUPS, AXIS)))
    return jax.jit(lambda: jnp.ones((jax.device_count(), *shape), jnp.float32), out_shardings=sharding)()


def _on_devices(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """The function, run by each device on its part of the arrays."""
    spec = PartitionSpec((GROUPS, AXIS))
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def _products(x: jax.Array, count: int) -> jax.Array:
    side = round(x.size**0.5)
    square = x.reshape(side, side)
    for _ in range(count):
        square = square @ square * (1 / side)
    return square.reshape(-1)


def _transposed(x: jax.Array) -> jax.Array:
    side = round(x.size**0.5)
    return _scaled(lax.optimization_barrier(x.reshape(side, side).T).reshape(-1))


def _scaled(x: jax.Array) -> jax.Array:
    return x * 0.999 + 0.001


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
