"""A machine as a file of figures with units: a chip's data sheet, what differs from it, and the networks.

    chip: h100               # the data sheet, see `mesh.targets`
    hosts: 16
    devices_per_host: 8
    across: {bandwidth: 400 Gb/s, latency: 14 us}    # of a device's adapter

`meshpar calibrate` writes such a file for GPUs: the figures that they reached.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from meshpar.config import Config, Positive, load
from meshpar.errors import ConfigError, Problems, nearest
from meshpar.mesh import targets
from meshpar.mesh.hardware import LINKS, Link, Links
from meshpar.planning.machine import ATTENTION, EFFICIENCY, MEMORY, StatedMachine

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*(\D*?)\s*$")
Amount = str | int | float
"""A number with its unit. One without is read too, so that all problems are said at once."""


class LinkFigures(Config):
    """A link of a device, one way."""

    bandwidth: Amount
    """Such as `400 Gb/s` or `50 GB/s`."""
    latency: Amount | None = None
    """Such as `14 us`. Default: that of the data sheet."""


class MachineFile(Config):
    """A machine by its data sheet, and the figures that differ."""

    chip: str
    """The chip, as a target names it: h100, v5p."""
    hosts: Positive = 1
    """Number of hosts, or slices of TPUs."""
    devices_per_host: Positive
    """Devices that the fast network joins."""
    products: Amount | None = None
    """Operations a second that products of bfloat16 reach: `650 TFLOP/s`. Default: 70 % of the data sheet."""
    attention: Amount | None = None
    """Operations a second that kernels of attention reach. Default: half of the data sheet."""
    memory: Amount | None = None
    """Memory of a device: `80 GB`."""
    memory_bandwidth: Amount | None = None
    """Bytes a second that operations on arrays reach: `3000 GB/s`. Default: 90 % of the data sheet."""
    launch: Amount | None = None
    """Time between two kernels: `1 us`."""
    inside: LinkFigures | None = None
    """The link of a device inside its host."""
    across: LinkFigures | None = None
    """The link of a device across hosts."""

    def machine(self, name: str) -> StatedMachine:
        """The machine.

        Args:
          name: of the file, for messages.

        Raises:
          ConfigError: lists every figure without a unit, and every figure of 0.
        """
        problems = Problems()
        known = {**targets.TPUS, **targets.GPUS, **targets.PLANNED}
        if self.chip not in known:
            near = nearest(self.chip, known)
            problems.add(
                "chip", f"no chip is called {self.chip!r}", (near and f"did you mean {near}?") or ", ".join(known)
            )
        is_tpu = self.chip in targets.TPUS
        shape = (self.hosts * self.devices_per_host,) if is_tpu else (self.hosts, self.devices_per_host)
        # The figures of an unknown chip are read all the same, so that all problems are said at once.
        chip = next((chip for chip in targets.CHIPS if chip.name == known.get(self.chip)), targets.CHIPS[0])

        def figure(key: str, unit: Callable[[str], float | None], example: str, default: float) -> float:
            text = getattr(self, key)
            return default if text is None else read_amount(key, str(text), unit, example, problems)

        bandwidth = figure("memory_bandwidth", rate_of_bytes, "3000 GB/s", MEMORY * chip.memory_bytes_per_s)
        memory = figure("memory", size, "80 GB", chip.memory_bytes)
        products = figure("products", operations, "650 TFLOP/s", EFFICIENCY * chip.flops)
        attention = figure("attention", operations, "400 TFLOP/s", ATTENTION * chip.flops)
        launch = figure("launch", seconds, "1 us", -1.0)
        stated = LINKS.get(chip.name)
        ends = {}
        for key in ("inside", "across"):
            link: LinkFigures | None = getattr(self, key)
            sheet = getattr(stated, key) if stated else Link(1.0, 0.0)
            if link is None:
                if stated is None:
                    problems.add(key, f"the links of {chip.name} are not known", f"{key}: {{bandwidth: 50 GB/s}}")
                ends[key] = sheet
                continue
            moved = read_amount(f"{key}.bandwidth", str(link.bandwidth), rate_of_bytes, "400 Gb/s", problems)
            late = sheet.latency_s
            if link.latency is not None:
                late = read_amount(f"{key}.latency", str(link.latency), seconds, "14 us", problems)
            ends[key] = Link(moved, late, sheet.torus)
        problems.raise_any(ConfigError, f"--target {name}:")
        text = f"{self.chip}:{'x'.join(map(str, shape))}"
        machine = StatedMachine.of(targets.Target(text, chip, shape, is_tpu), links=Links(**ends))
        return replace(
            machine,
            flops=products,
            attention=attention,
            memory_bytes=memory,
            per_host=self.devices_per_host,
            chip=replace(chip, memory_bytes_per_s=bandwidth / MEMORY),
            launched_s=None if launch < 0 else launch,
        )


def read_amount(key: str, text: str, unit: Callable[[str], float | None], example: str, problems: Problems) -> float:
    """A number with a unit; a problem is added, and 1 returned, if it is none or 0."""
    match = _AMOUNT.match(text)
    factor = unit(match[2]) if match else None
    if match is None or factor is None:
        what = f"{text!r} has no unit" if match and not match[2] else f"{text!r} is not such an amount"
        problems.add(key, what, f"write it as in {key.split('.')[-1]}: {example}")
        return 1.0
    if float(match[1]) == 0:
        never = "nothing takes no time" if unit is seconds else "nothing is ever done at 0"
        problems.add(key, f"{text!r}: {never}", f"write what it reaches, as in {example}, or leave it out")
        return 1.0
    return float(match[1]) * factor


def rate_of_bytes(unit: str) -> float | None:
    """Bytes a second in a unit such as `GB/s`, or `Gb/s` of bits."""
    amount, _, per = unit.partition("/")
    if per != "s" or amount[-1:] not in ("B", "b"):
        return None
    prefix = _PREFIXES.get(amount[:-1])
    return prefix and prefix / (8 if amount[-1] == "b" else 1)


def size(unit: str) -> float | None:
    """Bytes in a unit such as `GB` or `GiB`."""
    return _PREFIXES.get(unit[:-1]) if unit[-1:] == "B" else None


def operations(unit: str) -> float | None:
    """Operations a second in a unit such as `TFLOP/s`."""
    return _PREFIXES.get(unit.removesuffix("FLOP/s")) if unit.endswith("FLOP/s") else None


def seconds(unit: str) -> float | None:
    """Seconds in a unit such as `us`."""
    return _SECONDS.get(unit)


def read(path: Path) -> StatedMachine:
    """Reads a machine.

    Raises:
      ConfigError: lists every problem of the file.
    """
    return load(MachineFile, path).machine(str(path))
