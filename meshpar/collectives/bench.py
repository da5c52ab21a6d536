"""Times of the collectives on the devices that are here, beside XLA's own and what the tables say."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshpar.collectives import operations
from meshpar.collectives.algorithms import algorithms, plan
from meshpar.collectives.choose import here, seconds, work
from meshpar.collectives.plan import Operation, Plan
from meshpar.mesh.hardware import Link
from meshpar.tree import human_bytes

XLA = "xla"
AXIS = "x"
OWN: dict[Operation, Callable[[jax.Array], jax.Array]] = {
    "all_reduce": lambda x: lax.psum(x, AXIS),
    "all_gather": lambda x: lax.all_gather(x, AXIS, tiled=True),
    "reduce_scatter": lambda x: lax.psum_scatter(x, AXIS, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
}
"""What JAX has of its own."""


@dataclass(frozen=True)
class Timing:
    """One algorithm at one size.

    Args:
      algorithm: `xla` for JAX's own.
      num_bytes: S, of the larger of input and output.
      measured_s: median of a few calls.
      modelled_s: what the table says on the link; None for XLA's own, whose table is not known.
    """

    operation: str
    algorithm: str
    num_bytes: int
    measured_s: float
    modelled_s: float | None


@dataclass(frozen=True)
class Bench:
    """Timings on so many devices.

    Args:
      link: of the model: the makers' figures; else fitted to the timings.
      fitted: whether it is.
    """

    device: str
    num_devices: int
    link: Link
    fitted: bool
    timings: tuple[Timing, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        source = "fitted to these times" if self.fitted else "as their makers state it"
        link = f"{self.link.latency_s * 1e6:.3g} us, {self.link.bytes_per_s / 1e9:.3g} GB/s"
        lines = [f"{self.num_devices} x {self.device}; a link: {link}, {source}", ""]
        head = f"{'operation':<16}{'algorithm':<20}{'bytes':>12}{'measured':>14}{'modelled':>14}"
        return "\n".join([*lines, head, *map(_row, self.timings)])


def bench(wanted: list[Operation], sizes: list[int], num_calls: int = 7) -> Bench:
    """Measures every algorithm of some operations on all devices that are here.

    Args:
      sizes: bytes of the whole buffer, rounded up to whole floats for every rank.
    """
    timings = [one for operation in wanted for size in sizes for one in _timings(operation, size, num_calls)]
    link = here() or _fitted(timings)
    told = tuple(Timing(t.operation, t.algorithm, t.num_bytes, t.measured_s, _modelled(t, link)) for t in timings)
    return Bench(jax.devices()[0].device_kind, jax.device_count(), link, here() is None, told)


def _timings(operation: Operation, num_bytes: int, num_calls: int) -> Iterator[Timing]:
    """Of all algorithms, called in turn, so that what else the machine does falls on all alike."""
    n = jax.device_count()
    floats = -(-num_bytes // (4 * n * n)) * n * n
    bodies = {
        name: partial(getattr(operations, operation), axes=AXIS, algorithm=name) for name in algorithms(operation)
    }
    bodies |= {XLA: OWN[operation]} if operation in OWN else {}
    gathers = operation in ("all_gather", "gather")
    x = _laid_out(jnp.ones((n, floats // n if gathers else floats)))
    programs = {name: _compiled(body, x) for name, body in bodies.items()}
    times = [{name: _seconds(program, x) for name, program in programs.items()} for _ in range(num_calls)]
    for name in programs:
        yield Timing(operation, name, 4 * floats, statistics.median(turn[name] for turn in times), None)


def _laid_out(x: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(AXIS)))


def _compiled(body: Callable[[jax.Array], jax.Array], x: jax.Array) -> Callable[[jax.Array], jax.Array]:
    spec = PartitionSpec(AXIS)
    local = lambda x: body(x[0])[None]
    program = jax.jit(jax.shard_map(local, mesh=x.sharding.mesh, in_specs=spec, out_specs=spec))  # pyright: ignore
    program(x).block_until_ready()
    return program


def _seconds(program: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    start = time.perf_counter()
    program(x).block_until_ready()
    return time.perf_counter() - start


def _fitted(timings: list[Timing]) -> Link:
    """Latency and bandwidth that explain the times best, each time weighed as much as any other.

    The devices are taken to be on a switch.
    """
    known = [one for one in timings if one.algorithm != XLA]
    over = np.array([_terms(one) for one in known]) / np.array([[one.measured_s] for one in known])
    latency, per_byte = np.linalg.lstsq(over, np.ones(len(known)), rcond=None)[0]
    return Link(1 / max(per_byte, 1e-15), max(latency, 0.0))


def _terms(timing: Timing) -> tuple[float, float]:
    """By what latency and seconds a byte are multiplied."""
    table = _table(timing)
    hops, chunks = work(table, torus=False)
    return hops, chunks * timing.num_bytes / table.num_chunks


def _modelled(timing: Timing, link: Link) -> float | None:
    return None if timing.algorithm == XLA else seconds(_table(timing), timing.num_bytes, link)


def _table(timing: Timing) -> Plan:
    return plan(timing.operation, timing.algorithm, jax.device_count())  # pyright: ignore[reportArgumentType]


def _row(one: Timing) -> str:
    modelled = "" if one.modelled_s is None else f"{one.modelled_s * 1e6:.0f} us"
    measured = f"{one.measured_s * 1e6:.0f} us"
    return (
        f"{one.operation:<16}{one.algorithm:<20}{human_bytes(one.num_bytes):>12}{measured:>14}{modelled:>14}".rstrip()
    )
