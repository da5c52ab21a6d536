"""Compiles planned layouts for their machine, and compares the estimates with the compiled programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshpar.experiment import actions
from meshpar.experiment.config import Run
from meshpar.inspection.program.hlo import total_sent_bytes
from meshpar.inspection.report.table import table
from meshpar.planning.machine import Machine
from meshpar.planning.search import Candidate
from meshpar.tree import human_bytes, human_flops


@dataclass(frozen=True)
class Compiled:
    """What a device holds, computes and sends in the compiled step of a layout, by the compiler's figures.

    Args:
      at_most: bytes that a device may hold.
    """

    candidate: Candidate
    held_bytes: int
    flops: int
    sent_bytes: int
    at_most: int

    @property
    def fits(self) -> bool:
        return self.held_bytes <= self.at_most

    def as_json(self) -> dict[str, Any]:
        estimate = self.candidate.estimate
        work = self.candidate.work
        return {
            "layout": self.candidate.layout.changes,
            "fits": self.fits,
            "held_bytes": {"estimated": estimate.total_bytes, "compiled": self.held_bytes},
            "flops": {"estimated": work.computes.flops, "compiled": self.flops},
            "sent_bytes": {"estimated": work.sent_bytes, "compiled": self.sent_bytes},
        }


def compiled(run: Run, candidate: Candidate, machine: Machine, at_most: int) -> Compiled:
    """Compiles a run in a layout for a machine; for a measured one, on the devices of this process.

    Where hosts have different chips, for each kind alone: the program that holds the most counts.

    Raises:
      MeshError: the machine's compiler is not installed, or this process has other devices.
    """
    changed = candidate.layout.applied(run)
    every = [actions.inspect(changed, name).inspection for name in machine.targets] or [actions.inspect(changed)]
    found = max(every, key=lambda one: one.memory.total)
    return Compiled(candidate, found.memory.total, found.flops, round(total_sent_bytes(found.collectives)), at_most)


def table_of(all_compiled: Sequence[Compiled]) -> str:
    """Estimates beside what was compiled."""
    rows = []
    for one in all_compiled:
        estimate = one.candidate.estimate
        work = one.candidate.work
        rows.append(
            [
                human_bytes(estimate.total_bytes), human_bytes(one.held_bytes),
                human_flops(work.computes.flops), human_flops(one.flops),
                human_bytes(work.sent_bytes), human_bytes(one.sent_bytes),
                "" if one.fits else "does not fit: dropped", str(one.candidate.layout),
            ]
        )  # fmt: skip
    head = ["holds", "compiled", "computes", "compiled", "sends", "compiled", "", "layout"]
    return table(head, rows)
