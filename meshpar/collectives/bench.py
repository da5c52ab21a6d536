"""Times the collectives on this machine's devices, and compares them with XLA's own and with the model of `select`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshpar.collectives import operations
from meshpar.collectives.algorithms import algorithms, plan
from meshpar.collectives.plan import Operation, Plan
from meshpar.collectives.select import here, seconds, work
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
"""JAX's own collectives."""


@dataclass(frozen=True)
class Timing:
    """One algorithm at one size.

    Args:
      algorithm: `xla` for JAX's own collective.
      num_bytes: S, the size of the larger of input and output.
      measured_s: median of several calls.
      modelled_s: time of the plan by the model of the link; None for XLA's own, whose plan is unknown.
    """

    operation: str
    algorithm: str
    num_bytes: int
    measured_s: float
    modelled_s: float | None = None


@dataclass(frozen=True)
class Bench:
    """The timings of one machine.

    Args:
      link: the link of the model: from the makers' figures, or fitted to the timings if those are unknown.
      fitted: whether the link was fitted.
    """

    device: str
    num_devices: int
    link: Link
    fitted: bool
    timings: tuple[Timing, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def about(self) -> str:
        """The devices, and the link with which times are predicted."""
        source = "fitted to these times" if self.fitted else "as their makers state it"
        link = f"{self.link.latency_s * 1e6:.3g} us, {self.link.bytes_per_s / 1e9:.3g} GB/s"
        return f"{self.num_devices} x {self.device}; a link: {link}, {source}"

    def __str__(self) -> str:
        lines = [
            self.about,
            "",
            f"{'operation':<16}{'algorithm':<20}{'bytes':>12}{'measured':>14}{'modelled':>14}",
        ]
        for t in self.timings:
            modelled = "" if t.modelled_s is None else f"{t.modelled_s * 1e6:.0f} us"
            measured = f"{t.measured_s * 1e6:.0f} us"
            row = f"{t.operation:<16}{t.algorithm:<20}{human_bytes(t.num_bytes):>12}{measured:>14}{modelled:>14}"
            lines.append(row.rstrip())
        return "\n".join(lines)


def bench(wanted: list[Operation], sizes: list[int], num_calls: int = 7) -> Bench:
    """Measures every algorithm of some operations on all devices.

    Args:
      sizes: bytes of the whole buffer, rounded up to whole floats for every rank.
    """
    timings = [timing for operation in wanted for size in sizes for timing in _timings(operation, size, num_calls)]
    link = here() or _fitted(timings)
    for i, timing in enumerate(timings):
        if timing.algorithm != XLA:
            timings[i] = replace(timing, modelled_s=seconds(_plan_of(timing), timing.num_bytes, link))
    return Bench(jax.devices()[0].device_kind, jax.device_count(), link, here() is None, tuple(timings))


def _timings(operation: Operation, num_bytes: int, num_calls: int) -> Iterator[Timing]:
    """Times all algorithms in turn, so that a busy machine slows all of them alike."""
    n = jax.device_count()
    num_floats = -(-num_bytes // (4 * n * n)) * n * n
    bodies: dict[str, Callable[[jax.Array], jax.Array]] = {
        name: partial(getattr(operations, operation), axes=AXIS, algorithm=name) for name in algorithms(operation)
    }
    if operation in OWN:
        bodies[XLA] = OWN[operation]
    mesh = jax.make_mesh((n,), (AXIS,), axis_types=(AxisType.Auto,))
    gathers = operation in ("all_gather", "gather")
    x = np.ones((n, num_floats // n if gathers else num_floats), np.float32)
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec(AXIS)))
    programs = {name: _compiled(body, x) for name, body in bodies.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(num_calls):
        for name, program in programs.items():
            start = time.perf_counter()
            program(x).block_until_ready()
            times[name].append(time.perf_counter() - start)
    for name in programs:
        yield Timing(operation, name, 4 * num_floats, statistics.median(times[name]))


def _compiled(body: Callable[[jax.Array], jax.Array], x: jax.Array) -> Callable[[jax.Array], jax.Array]:
    def local(x: jax.Array) -> jax.Array:
        return body(x[0])[None]

    spec = PartitionSpec(AXIS)
    program = jax.jit(jax.shard_map(local, mesh=x.sharding.mesh, in_specs=spec, out_specs=spec))  # pyright: ignore
    program(x).block_until_ready()
    return program


def _fitted(timings: list[Timing]) -> Link:
    """The latency and bandwidth with the least relative error, for devices on a switch."""
    known = [timing for timing in timings if timing.algorithm != XLA]
    rows = []
    for timing in known:
        table = _plan_of(timing)
        hops, chunks = work(table, torus=False)
        rows.append([hops / timing.measured_s, chunks * timing.num_bytes / table.num_chunks / timing.measured_s])
    latency, per_byte = np.linalg.lstsq(np.array(rows), np.ones(len(known)), rcond=None)[0]
    return Link(1 / max(per_byte, 1e-15), max(latency, 0.0))


def _plan_of(timing: Timing) -> Plan:
    return plan(timing.operation, timing.algorithm, jax.device_count())  # pyright: ignore[reportArgumentType]
