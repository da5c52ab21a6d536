"""Measures an accelerator: products by shape, attention, memory, launches, and its links if there are several devices.

Every program repeats its operation in one call, and a figure is the median of rounds in which all programs run in turn.
The result is a file of figures, see `machine_file`, with what was measured beside what these figures predict.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshpar.config import to_yaml
from meshpar.cost.flops import ProductSizes
from meshpar.errors import ConfigError
from meshpar.mesh import targets
from meshpar.mesh.hardware import Chip, chip_of
from meshpar.planning.machine import BLOCK, filled
from meshpar.planning.machine_file import LinkFigures, MachineFile
from meshpar.tree import human_time

SHAPES = (
    (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (16384, 4096, 14336),
    (16384, 14336, 4096), (16384, 2048, 5632), (4096, 128, 4096),
)  # fmt: skip
"""Rows, terms and columns of products: squares, and those of an MLP."""
LARGE = 1e12
"""Products of at least so many operations say what a chip reaches; smaller ones are only compared."""
ATTENTION_SHAPES = ((8, 2048, 16, 128), (2, 8192, 16, 128))
"""Rows, tokens, heads and their size."""
COPIED = (2**22, 2**26, 2**28, 2**30)
"""Bytes of arrays that are scaled."""
SENT = (2**12, 2**16, 2**20, 2**24, 2**28)
"""Bytes of messages."""
CHAIN = 64
"""Operations of a program that tells the time between two of them."""
SECONDS = 20e-3
"""About how long a program repeats its operation."""
Program = Callable[[], Any]


@dataclass(frozen=True)
class Calibration:
    """A measured machine, and lines that say how its figures fit what was measured."""

    figures: MachineFile
    lines: Sequence[str]

    @property
    def text(self) -> str:
        return f"{self.figures.devices_per_host} x {self.figures.chip}, measured"

    def yaml(self) -> str:
        return "".join(f"# {line}\n" for line in self.lines) + to_yaml(self.figures)


def calibrate_chip(
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
    attention: Sequence[tuple[int, int, int, int]] = ATTENTION_SHAPES,
    copied: Sequence[int] = COPIED,
    sent: Sequence[int] = SENT,
    num_rounds: int = 5,
    chip: Chip | None = None,
) -> Calibration:
    """Measures the devices of this process.

    Args:
      chip: of which data sheet the figures are. Default: that of the device.

    Raises:
      ConfigError: no data sheet of this device is known.
    """
    device = jax.devices()[0]
    chip = chip or chip_of(device)
    names = {name: key for key, name in {**targets.TPUS, **targets.GPUS, **targets.PLANNED}.items()}
    if chip is None or chip.name not in names:
        raise ConfigError(f"calibrate knows no data sheet of a {device.device_kind}; the chips are {', '.join(names)}")
    products_s = _medians({shape: _product(*shape) for shape in shapes}, num_rounds)
    attention_s = _medians(_attentions(attention), num_rounds)
    copies_s = _medians({size: _copy(size) for size in copied}, num_rounds)
    launch_s = _launch(num_rounds)
    sizes = {shape: _sizes(*shape) for shape in shapes}
    rates = {shape: sizes[shape].num_flops / filled(sizes[shape], chip) / s for shape, s in products_s.items()}
    large = [rate for shape, rate in rates.items() if sizes[shape].num_flops >= LARGE] or [max(rates.values())]
    reached = statistics.median(large)
    lines = [f"{len(jax.devices())} x {device.device_kind}, jax {jax.__version__}, by `meshpar calibrate`."]
    for shape, seconds in products_s.items():
        predicted = sizes[shape].num_flops / filled(sizes[shape], chip) / reached + launch_s
        rate = f"{human_time(seconds)}, {sizes[shape].num_flops / seconds / 1e12:.0f} TFLOP/s"
        lines.append(f"product {'x'.join(map(str, shape))}: {rate}; predicted {predicted / seconds - 1:+.0%}")
    of_attention = {shape: _attention_flops(*shape) / seconds for shape, seconds in attention_s.items()}
    for shape, seconds in attention_s.items():
        lines.append(
            f"attention {'x'.join(map(str, shape))}: {human_time(seconds)}, {of_attention[shape] / 1e12:.0f} TFLOP/s"
        )
    moved = {size: 2 * size / seconds for size, seconds in copies_s.items()}
    lines += [f"{size >> 20} MiB scaled: {human_time(s)}, {moved[size] / 1e9:.0f} GB/s" for size, s in copies_s.items()]
    figures: dict[str, Any] = {
        "chip": names[chip.name],
        "devices_per_host": len(jax.devices()),
        "products": f"{reached / 1e12:.4g} TFLOP/s",
        "memory_bandwidth": f"{max(moved.values()) / 1e9:.4g} GB/s",
        "launch": f"{launch_s * 1e6:.3g} us",
    }
    if of_attention:
        figures["attention"] = f"{statistics.median(of_attention.values()) / 1e12:.4g} TFLOP/s"
    if len(jax.devices()) > 1:
        figures["inside"] = _link(sent, num_rounds, lines)
    return Calibration(MachineFile.model_validate(figures), lines)


def _medians(programs: Mapping[Any, tuple[Program, int]], num_rounds: int) -> dict[Any, float]:
    """Median seconds of one operation of each program; the programs run in turn.

    Args:
      programs: what -> a program, and how often it repeats its operation.
    """
    found: dict[Any, list[float]] = {key: [] for key in programs}
    for program, _ in programs.values():
        jax.block_until_ready(program())
    for _ in range(num_rounds):
        for key, (program, times) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            found[key].append((time.perf_counter() - start) / times)
    return {key: statistics.median(times) for key, times in found.items()}


def _sizes(rows: int, terms: int, columns: int) -> ProductSizes:
    return ProductSizes("dot_general", 2 * rows * terms * columns, 1, rows, columns, terms, 2)


def _times(seconds: float) -> int:
    """How often a program repeats an operation of about so many seconds."""
    return int(max(4, min(512, SECONDS / seconds)))


def _normal(seed: int, *shape: int) -> jax.Array:
    """Normal numbers: products of equal numbers take less power, and run faster."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _product(rows: int, terms: int, columns: int) -> tuple[Program, int]:
    """Each product reads a result of the one before, so that none is left out or merged with another."""
    times = _times(2.0 * rows * terms * columns / 400e12)

    def repeated(x: jax.Array, w: jax.Array) -> jax.Array:
        def one(_: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, _ = carry
            y = x @ w
            return x.at[0, 0].set(y[0, 0] * 1e-3), y

        return lax.fori_loop(0, times, one, (x, jnp.zeros((rows, columns), x.dtype)))[1][0, :1]

    arrays = _normal(0, rows, terms), _normal(1, terms, columns)
    return partial(jax.jit(repeated), *arrays), times


def _attentions(shapes: Sequence[tuple[int, int, int, int]]) -> dict[Any, tuple[Program, int]]:
    """Causal attention, forward and backward, where the platform has a kernel for it."""
    if jax.default_backend() != "gpu":
        return {}
    return {shape: _attention(*shape) for shape in shapes}


def _attention(rows: int, seq: int, heads: int, size: int) -> tuple[Program, int]:
    times = _times(_attention_flops(rows, seq, heads, size) / 300e12)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return out.astype(jnp.float32).sum()

    def repeated(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        def one(_: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            gradients = jax.grad(loss, argnums=(0, 1, 2))(*carry)
            return tuple(x + 1e-3 * g for x, g in zip(carry, gradients, strict=True))

        return lax.fori_loop(0, times, one, (q, k, v))[0][0, 0, 0, :1]

    arrays = [_normal(seed, rows, seq, heads, size) for seed in range(3)]
    return partial(jax.jit(repeated), *arrays), times


def _attention_flops(rows: int, seq: int, heads: int, size: int) -> float:
    """Operations of causal attention, forward and backward, with those of the diagonal's tiles."""
    return 7 * 2 * rows * heads * size * seq * (seq + BLOCK) / 2


def _copy(num_bytes: int) -> tuple[Program, int]:
    times = _times(2 * num_bytes / 1e12)

    def repeated(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, times, lambda _, x: x * 0.999, x)[:1]

    return partial(jax.jit(repeated), jnp.ones(num_bytes // 4, jnp.float32)), times


def _launch(num_rounds: int) -> float:
    """Seconds from one small operation to the next: a chain of products that nothing fuses, and one twice as long."""

    def chain(count: int, x: jax.Array) -> jax.Array:
        for _ in range(count):
            x = x @ x
        return x

    x = jnp.eye(64, dtype=jnp.bfloat16)
    programs = {count: (partial(jax.jit(partial(chain, count)), x), 1) for count in (CHAIN, 2 * CHAIN)}
    found = _medians(programs, max(num_rounds, 11))
    return max(1e-9, (found[2 * CHAIN] - found[CHAIN]) / CHAIN)


def _link(sizes: Sequence[int], num_rounds: int, lines: list[str]) -> LinkFigures:
    """The bandwidth and latency of all-gathers: the slope and the start of their times by size."""
    count = len(jax.devices())
    mesh = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,))
    seconds = _medians({size: _gather(size, mesh) for size in sizes}, num_rounds)
    for size, each in seconds.items():
        lines.append(f"all-gather of {size >> 10} KiB over {count}: {human_time(each)}")
    least, most = min(sizes), max(sizes)
    sent = (count - 1) / count
    rate = sent * (most - least) / max(1e-12, seconds[most] - seconds[least])
    messages = max(1, (count - 1).bit_length())
    late = max(1e-9, seconds[least] - sent * least / rate) / messages
    return LinkFigures(bandwidth=f"{rate / 1e9:.4g} GB/s", latency=f"{late * 1e6:.3g} us")


def _gather(num_bytes: int, mesh: Mesh) -> tuple[Program, int]:
    count = mesh.size
    times = _times(num_bytes / 100e9)
    floats = max(1, num_bytes // 4 // count)

    def repeated(x: jax.Array) -> jax.Array:
        def one(_: Any, x: jax.Array) -> jax.Array:
            return lax.all_gather(x, "x", tiled=True)[: x.size] * 0.999

        return lax.fori_loop(0, times, one, x)

    spec = PartitionSpec("x")
    program = jax.jit(jax.shard_map(repeated, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jax.device_put(jnp.ones(floats * count, jnp.float32), NamedSharding(mesh, spec))
    return partial(program, x), times
