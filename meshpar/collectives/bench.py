"""Times the collectives on this machine's devices, and compares them with XLA's own and with the model of `select`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
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

    @property
    def plan(self) -> Plan:
        return plan(self.operation, self.algorithm, jax.device_count())  # pyright: ignore[reportArgumentType]


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
        rows: list[tuple[str, ...]] = [("operation", "algorithm", "bytes", "measured", "modelled")]
        for t in self.timings:
            times = ("" if s is None else f"{s * 1e6:.0f} us" for s in (t.measured_s, t.modelled_s))
            rows.append((t.operation, t.algorithm, human_bytes(t.num_bytes), *times))
        return "\n".join([self.about, "", *("{:<16}{:<20}{:>12}{:>14}{:>14}".format(*row).rstrip() for row in rows)])

    def plot(self, path: Path) -> None:
        """Plots time against size, one panel per operation: points are measured, dashed lines are modelled."""
        from matplotlib.figure import Figure

        of_operation = {name: list(each) for name, each in groupby(self.timings, lambda one: one.operation)}
        figure = Figure(figsize=(5.5 * len(of_operation), 4.2), layout="constrained")
        panels = figure.subplots(1, len(of_operation), squeeze=False)[0]
        for panel, (operation, timings) in zip(panels, of_operation.items(), strict=True):
            for name in dict.fromkeys(one.algorithm for one in timings):
                mine = [one for one in timings if one.algorithm == name]
                sizes = [one.num_bytes for one in mine]
                [line] = panel.loglog(sizes, [one.measured_s for one in mine], "o-", label=name)
                if name != XLA:
                    panel.loglog(sizes, [one.modelled_s for one in mine], "--", color=line.get_color(), alpha=0.6)
            panel.set(title=f"{operation}, {self.num_devices} x {self.device}", xlabel="bytes", ylabel="seconds")
            panel.legend()
        figure.supxlabel(f"points: measured; dashed: predicted from the table of the algorithm\n{self.about}", size=9)
        figure.savefig(path)


def bench(wanted: list[Operation], sizes: list[int], num_calls: int = 7) -> Bench:
    """Measures every algorithm of some operations on all devices.

    Args:
      sizes: bytes of the whole buffer, rounded up to whole floats for every rank.
    """
    measured = [timing for operation in wanted for size in sizes for timing in _timings(operation, size, num_calls)]
    link = here() or _fitted([one for one in measured if one.algorithm != XLA])
    timings = [
        one if one.algorithm == XLA else replace(one, modelled_s=seconds(one.plan, one.num_bytes, link))
        for one in measured
    ]
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
    gathers = operation in ("all_gather", "gather")
    mesh = jax.make_mesh((n,), (AXIS,), axis_types=(AxisType.Auto,))
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
    spec = PartitionSpec(AXIS)
    local = jax.shard_map(lambda x: body(x[0])[None], mesh=x.sharding.mesh, in_specs=spec, out_specs=spec)  # pyright: ignore
    program = jax.jit(local)
    program(x).block_until_ready()
    return program


def _fitted(timings: list[Timing]) -> Link:
    """The latency and bandwidth with the least relative error, for devices on a switch."""
    rows = []
    for one in timings:
        hops, chunks = work(one.plan, torus=False)
        rows.append([hops / one.measured_s, chunks * one.num_bytes / one.plan.num_chunks / one.measured_s])
    latency, per_byte = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)[0]
    return Link(1 / max(per_byte, 1e-15), max(latency, 0.0))
