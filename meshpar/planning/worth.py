"""What a plan is worth: how much faster a step would be on a better machine, what it costs, and how sure it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from meshpar.errors import Problems
from meshpar.planning.alternatives import shown
from meshpar.planning.machine import Machine
from meshpar.planning.published_file import read
from meshpar.planning.search import Candidate
from meshpar.tree import human_time

TWICE = 2.0
_PRICE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]{3}|[$€£])\s*$")


@dataclass(frozen=True)
class Price:
    """Money for an hour of a device."""

    amount: float
    currency: str

    @classmethod
    def parse(cls, text: str, problems: Problems) -> Price | None:
        """Reads a price such as `2.50 USD`; adds a problem if there is no number, or no currency."""
        match = _PRICE.match(text)
        if match is None:
            has_number = re.fullmatch(r"\s*\d+(\.\d+)?\s*", text)
            what = "has no currency" if has_number else "is not a price"
            example = f"{text.strip()} USD" if has_number else "2.50 USD"
            problems.add(f"--price {text}", what, f"write that of a device and hour, as in --price '{example}'")
            return None
        return cls(float(match[1]), match[2].upper())


def costs(best: Candidate, machine: Machine, step_tokens: float, num_tokens: float, price: Price | None) -> str:
    """Device-hours, and money, to train for a number of tokens in a layout."""
    seconds = num_tokens / step_tokens * best.estimate.total_s
    hours = seconds * machine.num_devices / 3600
    text = f"{num_tokens:,.0f} tokens take {human_days(seconds)}, {hours:,.0f} device-hours"
    return f"{text}, {hours * price.amount:,.0f} {price.currency}" if price else text


def human_days(seconds: float) -> str:
    """A duration in days, if it is long."""
    return f"{seconds / 86400:,.1f} days" if seconds > 86400 else human_time(seconds)


def sensitivity(best: Candidate, candidates: Sequence[Candidate], machine: Machine, at_most: float) -> list[str]:
    """How much less time a step takes with twice of each figure of the machine, the most first; of memory, in the
    fastest traced layout that then fits."""
    now = best.estimate.total_s
    found = {
        f"{shown(TWICE * figure.value)} {figure.name}": best.work.on(figure.scaled(TWICE)).total_s
        for figure in machine.figures
    }
    larger = [one.estimate.total_s for one in candidates if one.estimate.total_bytes <= TWICE * at_most]
    found["twice the memory"] = min([now, *larger])
    ranked = sorted(found.items(), key=lambda one: one[1])
    return [f"{1 - seconds / now:4.0%}  {name}" for name, seconds in ranked if seconds < 0.995 * now]


def uncertainty(machine: Machine) -> str:
    """How published steps on chips of this kind compare with estimates; empty if none was published."""
    family = machine.text.split("_")[0].split(":")[0]
    took = [took for source in read().sources if source.chip.split("_")[0] == family for took in source.took]
    if not took:
        return ""
    return (
        f"published steps on {family}s took {min(took):.2f} to {max(took):.2f} times such an estimate"
        " (meshpar plan --published)"
    )
