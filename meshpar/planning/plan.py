"""Plans a run: the fastest layouts that fit a machine, where their time goes, and why the others lose."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from meshpar.config import to_yaml
from meshpar.data.rows.config import RowData
from meshpar.errors import ConfigError, Problems
from meshpar.experiment.config import Run, as_run
from meshpar.mesh import targets
from meshpar.planning import machine_file, measured
from meshpar.planning.alternatives import FARTHEST, Alternative, alternatives
from meshpar.planning.compiled import Compiled, compiled, table_of
from meshpar.planning.constraints import constrained, fixed
from meshpar.planning.machine import Machine, StatedMachine
from meshpar.planning.mixed import MixedMachine
from meshpar.planning.search import Candidate, Found, pareto, refusal, search
from meshpar.planning.worth import Price, costs, sensitivity, uncertainty
from meshpar.tree import human_bytes, human_time, parse_bytes

COMPILED = 5
"""How many layouts `compile` compiles."""
USABLE = Fraction(94, 100)
"""The share of a chip's memory that a step may hold; the rest is the runtime's."""


@dataclass(frozen=True)
class Plan:
    """Layouts of a run on a machine, by the estimates of their traced steps.

    Args:
      at_most: bytes that a device may hold.
      compiled: the best layouts, compiled for the machine.
      is_pareto: whether only layouts are ranked that no other beats in both time and memory.
      num_tokens: of which the cost is said.
      price: of a device and hour.
    """

    run: Run
    machine: Machine
    found: Found
    at_most: int
    compiled: Sequence[Compiled] = ()
    is_pareto: bool = False
    num_tokens: float | None = None
    price: Price | None = None

    @property
    def ranked(self) -> Sequence[Candidate]:
        """The layouts that fit, the fastest first, without those that do not fit once they are compiled."""
        dropped = [one.candidate for one in self.compiled if not one.fits]
        kept = [one for one in self.found.ranked if one not in dropped]
        return pareto(kept, lambda one: one.estimate) if self.is_pareto else kept

    @cached_property
    def alternatives(self) -> Sequence[Alternative]:
        """What would change the answer, the nearest change first."""
        return alternatives(self.machine, [*self.found.ranked, *self.found.too_big], self.ranked[0], self.at_most)

    def compile(self, count: int = COMPILED) -> Self:
        """The plan without those of the best layouts that do not fit once they are compiled for the machine.

        Raises:
          MeshError: the machine's compiler is not installed.
          ConfigError: none of them fits.
        """
        checked = [compiled(self.run, one, self.machine, self.at_most) for one in self.ranked[:count]]
        plan = replace(self, compiled=checked)
        if not plan.ranked:
            raise ConfigError(f"{self.machine.text}: no layout fits once it is compiled:\n{table_of(checked)}")
        return plan

    @cached_property
    def best(self) -> Run:
        """The run in the fastest layout."""
        return self.ranked[0].layout.applied(self.run)

    def as_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {
            "target": self.machine.text,
            "num_layouts": self.found.num_layouts,
            "at_most_bytes": self.at_most,
            "ranked": [_plain(one) for one in self.ranked],
            "too_big": [_plain(one) for one in self.found.too_big],
            "helps": list(self.helps),
            "costs": list(self.costs),
            "alternatives": [{"with": one.figure, "layout": one.layout.changes} for one in self.alternatives],
            "compiled": [one.as_json() for one in self.compiled],
        }

    def yaml(self) -> str:
        """The config of the best layout, with what the plan says of it in comments."""
        first, *others = self.ranked
        best = first.estimate
        step = human_time(best.total_s)
        terms = ", ".join(f"{human_time(time)} {term}" for term, time in best.terms.items())
        lines = [
            f"Planned for {self.machine.text}. Estimated from the trace: a step takes {step} ({terms}).",
            f"A device holds {human_bytes(best.total_bytes)} of {human_bytes(self.at_most)}.",
            *_stages(first, self.machine),
            *(f"The next layout, {other.layout}, loses by: {loses_by(other, first)}." for other in others[:1]),
            *(f"Another layout would win {alternative}." for alternative in self.alternatives[:1]),
        ]
        return "".join(f"# {line}\n" for line in lines) + to_yaml(self.best)

    def __str__(self) -> str:
        traced = len(self.found.ranked) + len(self.found.too_big)
        of = f"{self.machine.text}: {self.machine.num_devices} devices"
        done = f"the best {len(self.compiled)} were compiled" if self.compiled else "nothing was compiled or run"
        lines = [
            f"{of}; {self.found.num_layouts} layouts, {traced} of them traced; {done}",
            f"{'':4}{'step':>10}  {'holds':>10}  {'loses by':32}  layout",
        ]
        best = self.ranked[0]
        for rank, one in enumerate(self.ranked, 1):
            holds = human_bytes(one.estimate.total_bytes)
            lines.append(
                f"{rank:3} {human_time(one.estimate.total_s):>10}  {holds:>10}  {loses_by(one, best):32}  {one.layout}"
            )
        lines.append("")
        lines.append("where the time of the first goes:")
        total = best.estimate.total_s
        lines += [
            f"  {human_time(time):>10}  {time / total:4.0%}  {term}" for term, time in best.estimate.terms.items()
        ]
        stages = _stages(best, self.machine)
        lines += ["the stages of its pipeline:", *(f"  {line}" for line in stages)] if stages else []
        if self.found.too_big:
            least = self.found.too_big[0]
            count = len(self.found.too_big)
            holds = human_bytes(least.estimate.total_bytes)
            lines.append(f"{count} of the traced hold more than {human_bytes(self.at_most)}; the smallest {holds}:")
            lines.append(f"  {least.layout}")
        if helps := self.helps:
            lines += ["", "how much faster a step would be with:", *(f"  {one}" for one in helps)]
        lines += ["", "what would change the answer, of the traced layouts:"]
        lines += [f"  {one}" for one in self.alternatives] or [f"  no figure of the machine, up to {FARTHEST:g} times"]
        lines += ["", *self.costs] if self.costs else []
        if self.compiled:
            lines += ["", table_of(self.compiled)]
        return "\n".join(lines)

    @cached_property
    def helps(self) -> Sequence[str]:
        """How much faster a step would be with twice of a figure of the machine, the most first."""
        return sensitivity(self.ranked[0], [*self.found.ranked, *self.found.too_big], self.machine, self.at_most)

    @cached_property
    def costs(self) -> Sequence[str]:
        """What a step processes, what the tokens cost, and how sure that is."""
        best = self.ranked[0]
        data: Any = self.run.data
        step_tokens = data.batch_size * data.seq_len
        speed = step_tokens / best.estimate.total_s / self.machine.num_devices
        lines = [f"{speed:,.0f} {'tokens' if _has_tokens(self.run) else 'rows'} a second and device"]
        if self.num_tokens:
            lines.append(costs(best, self.machine, step_tokens, self.num_tokens, self.price))
        return [*lines, *filter(None, [uncertainty(self.machine)])]


def plan(
    run: Run | Path | str,
    target: str,
    *,
    fix: Iterable[str] = (),
    at_most: str | int | None = None,
    pareto: bool = False,
    tokens: float | None = None,
    price: str | None = None,
) -> Plan:
    """Finds the fastest layouts of a run on a machine, by estimates from traced steps. Nothing is compiled or run.

    It considers the sizes of all axes, ZeRO's stages, pipeline schedules and the hosts of their stages, microbatches,
    remat and overlap. A rough estimate ranks all layouts, and the steps of the best ones are traced.

    Args:
      run: a run, or the path of a config file.
      target: the machine, such as `h100:8x8` or `v5p:4x4x4`, hosts of different chips, such as `h100:4x8+a100:4x8`,
        or a file that `meshpar calibrate` wrote.
      fix: `key=value` of a layout that is given: `mesh.tensor=8`, `rules=[fsdp,megatron_sp]`, `num_microbatches=4`,
        `parallel.pipeline.kind=1f1b`, `parallel.tensor.overlap=none`, `model.remat=full`.
      at_most: bytes that a device may hold, such as `60GiB`. Default: 94 % of its memory.
      pareto: rank only layouts that no other beats in both time and memory.
      tokens: a number of tokens, of which the device-hours are said.
      price: money for an hour of a device, such as `2.50 USD`, of which the costs are said.

    Raises:
      ConfigError: no layout fits, with the closest; or `fix` contradicts itself, the machine or the run.
      MeshError: there is no such machine.

    Examples:
      >>> from meshpar import Run, plan
      >>> run = Run(
      ...     model={"kind": "llama", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64},
      ...     data={"kind": "synthetic", "batch_size": 8, "seq_len": 64}, optim={"kind": "adamw", "lr": 1e-3},
      ...     num_steps=10, run_dir="unused",
      ... )
      >>> plan(run, "h100:1x4", fix=["mesh.data=4", "model.remat=none"]).best.mesh.data
      4
    """
    run = as_run(run)
    machine = _machine(target)
    problems = Problems()
    if tokens is not None and not 0 < tokens < math.inf:
        problems.add(f"--tokens {tokens:g}", "costs are those of a positive number of tokens", "as in --tokens 15e12")
    elif tokens is not None and not _has_tokens(run):
        problems.add(f"--tokens {tokens:g}", "the rows of this run's data have no tokens", "leave it out")
    priced = Price.parse(price, problems) if price is not None else None
    if price is not None and tokens is None:
        problems.add(f"--price {price}", "it is of no number of tokens", "add --tokens, as in --tokens 15e12")
    limit = _limit(machine, at_most, problems)
    wanted = fixed(fix, problems)
    problems.raise_any(ConfigError, "the plan cannot be made:")
    with _collecting_rarely():
        choices, overlaps = constrained(run, machine, wanted)
        found = search(run, machine, limit, choices, pareto, overlaps)
    if not found.ranked:
        raise ConfigError(_nothing_fits(run, machine, found, limit))
    return Plan(run, machine, found, limit, is_pareto=pareto, num_tokens=tokens, price=priced)


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Lets Python search for garbage rarely: nearly all objects of a search stay alive, and there are many."""
    thresholds = gc.get_threshold()
    gc.set_threshold(400_000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _has_tokens(run: Run) -> bool:
    return not isinstance(run.data, RowData)


def _machine(target: str) -> Machine:
    if Path(target).suffix in (".yaml", ".yml"):
        path = Path(target)
        is_measured = path.is_file() and re.search(
            r"^device:", path.read_text(encoding="utf-8", errors="replace"), re.M
        )
        return measured.read(path) if is_measured else machine_file.read(path)
    if "+" in target:
        return MixedMachine.of(target)
    return StatedMachine.of(targets.parse(target))


def _limit(machine: Machine, at_most: str | int | None, problems: Problems) -> int:
    """Bytes that a device may hold."""
    limit = int(USABLE * round(machine.memory_bytes))
    if at_most is None:
        return limit
    try:
        limit = int(parse_bytes(at_most))
    except ValueError as error:
        problems.add(f"--at-most {at_most}", str(error))
    if limit > machine.memory_bytes:
        has = human_bytes(round(machine.memory_bytes))
        problems.add(f"--at-most {at_most}", f"a device of {machine.text} has {has}", "give less, or leave it out")
    return limit


def _nothing_fits(run: Run, machine: Machine, found: Found, at_most: int) -> str:
    if not found.too_big:
        first = min(found.rough, key=lambda layout: found.rough[layout].order)
        return f"{machine.text}: none of {found.num_layouts} layouts fits this run:\n{refusal(run, first, machine)}"
    least = found.too_big[0]
    lacks = human_bytes(least.estimate.total_bytes - at_most)
    return (
        f"{machine.text}: no layout holds at most {human_bytes(at_most)}; the closest holds"
        f" {human_bytes(least.estimate.total_bytes)}, {lacks} too many:\n  {least.layout}\n"
        "  more devices, a smaller data.batch_size or data.seq_len, or precision.params=bfloat16"
    )


def loses_by(one: Candidate, best: Candidate) -> str:
    """The term by which a layout loses most."""
    terms = one.estimate.terms
    more = {term: time - best.estimate.terms.get(term, 0.0) for term, time in terms.items()}
    term = max(more, key=lambda term: more[term])
    if one is best:
        return ""
    if more[term] >= 1e-3 * best.estimate.total_s:
        return f"{human_time(more[term])} {term}"
    hides = one.estimate.beside_s - best.estimate.beside_s
    return f"{human_time(hides)} more to hide" if hides > 1e-6 * best.estimate.total_s else "nothing: equal"


def _stages(one: Candidate, machine: Machine) -> list[str]:
    """What each stage of a pipeline has and takes, with one line for equal stages beside each other."""
    stages = one.work.stages
    if stages is None or machine.shares_cores:
        return []
    chips = machine.stages(one.work.mesh, one.work.dcn)
    rows: list[str] = []
    for stage, (layers, busy, chip) in enumerate(zip(stages.layers, one.work.busy(machine), chips, strict=True)):
        has = f"{layers} layer{'s' if layers > 1 else ''}{' and the loss' if stage == stages.last else ''}"
        on = f" on {chip.text}" if chip is not machine else ""
        rows.append(f"{has}, {human_time(busy.total)}{on}")
    lines = []
    first = 0
    for text, alike in groupby(rows):
        last = first + len([*alike]) - 1
        lines.append(f"stage{f's {first} to' if last > first else ''} {last}: {text}")
        first = last + 1
    return lines


def _plain(one: Candidate) -> dict[str, Any]:
    of = one.estimate
    return {
        "layout": one.layout.changes,
        "step_s": of.total_s,
        "terms_s": dict(of.terms),
        "beside_s": of.beside_s,
        "states_bytes": of.states_bytes,
        "step_bytes": of.step_bytes,
    }
