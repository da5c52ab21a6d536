"""Judges whether a program fits a target machine, and how much it sends over each of the machine's networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from meshpar.errors import MeshError
from meshpar.inspection.inspect import Inspection
from meshpar.inspection.program.hlo import Collective, total_sent_bytes
from meshpar.mesh.targets import Target
from meshpar.sharding.resolve import AnyMesh
from meshpar.tree import human_bytes

Program = TypeVar("Program")


@dataclass(frozen=True)
class FitReport:
    """The fit of a compiled program on a machine, by the figures of the compiler and of the maker; nothing was run.

    `meshpar.inspect(run, target="v5e:4x4")` returns it.

    Args:
      inspection: the inspection of the program.
      target: the machine.
      sent_inside: bytes that a device sends within its slice of TPUs, or its host of GPUs.
      sent_across: bytes that a GPU sends in groups that span several hosts.
    """

    inspection: Inspection
    target: Target
    sent_inside: int
    sent_across: int

    @property
    def fits(self) -> bool:
        """Whether a device's memory holds the program's arguments, outputs and temporaries."""
        return self.inspection.memory.total <= self.target.chip.memory_bytes

    @property
    def products_s(self) -> float:
        """Seconds of the matrix products at the chip's peak rate for bfloat16, a lower bound of the step time."""
        return self.inspection.flops / self.target.chip.flops

    def as_json(self) -> dict[str, Any]:
        """The inspection and the comparison with the machine, as plain data."""
        return self.inspection.as_json() | {
            "target": self.target.text,
            "fits": self.fits,
            "chip_bytes": round(self.target.chip.memory_bytes),
            "sent_inside_bytes": self.sent_inside,
            "sent_across_bytes": self.sent_across,
            "products_s_estimate": self.products_s,
        }

    def __str__(self) -> str:
        chip = self.target.chip
        held = self.inspection.memory.total
        host = self.inspection.memory.host
        sent = f"{human_bytes(self.sent_inside)} within the slice"
        if not self.target.is_tpu:
            sent = f"{human_bytes(self.sent_inside)} within hosts, {human_bytes(self.sent_across)} across hosts"
        lines = [
            f"{self.target.text}: {self.target.num_chips} x {chip.name}; compiled for it, not run",
            f"  {'fits' if self.fits else 'does not fit'}: a device holds {human_bytes(held)} of "
            f"{human_bytes(chip.memory_bytes)} ({held / chip.memory_bytes:.1%})"
            + (f", and {human_bytes(host)} in the host's memory" if host else ""),
            f"  sends {sent}",
            f"  matrix products: {1e3 * self.products_s:.3g} ms at the chip's peak, an estimate that no step can beat",
        ]
        return "\n".join([*lines, "", str(self.inspection)])


def judge(inspection: Inspection, target: Target, mesh: AnyMesh) -> FitReport:
    """Compares a program with the machine for which it was compiled."""
    assert isinstance(mesh, Mesh), "a target has devices"
    devices = mesh.devices.flatten()

    def spans_hosts(one: Collective) -> bool:
        return any(len({devices[number].process_index for number in group}) > 1 for group in one.groups)

    # A slice of TPUs is one network.
    across = [] if target.is_tpu else [one for one in inspection.collectives if spans_hosts(one)]
    sent_across = total_sent_bytes(across)
    sent_inside = total_sent_bytes(inspection.collectives) - sent_across
    return FitReport(inspection, target, round(sent_inside), round(sent_across))


def compile_for(target: Target, compile_: Callable[[], Program]) -> Program:
    """Compiles a program for a target. A program that is too big for the target is an error of the user, not a bug.

    Raises:
      MeshError: the compiler reports too little memory; the text has its figures.
    """
    try:
        return compile_()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        report = str(error).strip().partition("\n")[0]
        raise MeshError(f"--target {target.text}: the step does not fit; the compiler reports: {report}") from None
