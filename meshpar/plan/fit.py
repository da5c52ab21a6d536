"""Whether a program fits a machine that is not here, and over which of its networks it communicates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from meshpar.errors import MeshError
from meshpar.inspection.inspect import Inspection
from meshpar.inspection.program.hlo import Collective
from meshpar.plan.targets import Target
from meshpar.sharding.resolve import AnyMesh
from meshpar.tree import human_bytes

Program = TypeVar("Program")


@dataclass(frozen=True)
class Judgement:
    """A compiled program against a machine. Nothing was run: these are the compiler's statements and the maker's.

    Args:
      told: the program.
      target: the machine.
      sent_inside: bytes that a device sends within its slice of TPUs, or its host of GPUs.
      sent_across: bytes that it sends in groups that reach beyond its host.
    """

    told: Inspection
    target: Target
    sent_inside: int
    sent_across: int

    @property
    def fits(self) -> bool:
        return self.told.memory.total <= self.target.chip.memory_bytes

    @property
    def products_s(self) -> float:
        """Seconds of its matrix products at the chip's peak rate for bfloat16: no step can be faster."""
        return self.told.flops / self.target.chip.flops

    def as_json(self) -> dict[str, Any]:
        """The inspection as plain data, and the judgement beside it."""
        return self.told.as_json() | {
            "target": self.target.text,
            "fits": self.fits,
            "chip_bytes": round(self.target.chip.memory_bytes),
            "sent_inside_bytes": self.sent_inside,
            "sent_across_bytes": self.sent_across,
            "products_s_estimate": self.products_s,
        }

    def __str__(self) -> str:
        chip, held = self.target.chip, self.told.memory.total
        lines = [
            f"{self.target.text}: {self.target.num_chips} x {chip.name}; compiled for it, not run",
            f"  {'fits' if self.fits else 'does not fit'}: a device holds {human_bytes(held)} of "
            f"{human_bytes(chip.memory_bytes)} ({held / chip.memory_bytes:.1%})",
            "  sends " + self._networks(),
            f"  matrix products: {1e3 * self.products_s:.3g} ms at the chip's peak, an estimate that no step can beat",
        ]
        return "\n".join([*lines, "", str(self.told)])

    def _networks(self) -> str:
        if self.target.is_tpu:
            return f"{human_bytes(self.sent_inside)} within the slice"
        return f"{human_bytes(self.sent_inside)} within hosts, {human_bytes(self.sent_across)} across hosts"


def judge(told: Inspection, target: Target, mesh: AnyMesh) -> Judgement:
    """Holds a program that was compiled for a machine against it."""
    assert isinstance(mesh, Mesh), "a target has devices"
    sent = {True: Fraction(0), False: Fraction(0)}
    for one in told.collectives:
        sent[_reaches_beyond(one, target, mesh)] += one.times * one.sent_bytes
    return Judgement(told, target, round(sent[False]), round(sent[True]))


def compile_for(target: Target, compile_: Callable[[], Program]) -> Program:
    """Compiles; that a program is too big for a machine is no bug.

    Raises:
      MeshError: the compiler says that memory does not suffice, and how much it wants.
    """
    try:
        return compile_()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = str(error).strip().partition("\n")[0]
        raise MeshError(f"--target {target.text}: the step does not fit; the compiler says: {said}") from None


def _reaches_beyond(one: Collective, target: Target, mesh: Mesh) -> bool:
    """Whether any group has GPUs of more than one host; a slice of TPUs is one network."""
    devices = mesh.devices.flatten()
    hosts = ({devices[number].process_index for number in group} for group in one.groups)
    return not target.is_tpu and any(len(of_group) > 1 for of_group in hosts)
