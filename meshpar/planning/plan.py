"""Plans a run: the fastest layouts that fit a machine, what each second goes to, and why the others lose."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from meshpar.config import flatten_json, to_yaml
from meshpar.errors import ConfigError, Problems, nearest
from meshpar.experiment.config import Run
from meshpar.mesh import targets
from meshpar.mesh.layout import AXES
from meshpar.planning.machine import Machine
from meshpar.planning.search import Candidate, Found, search
from meshpar.planning.space import Layout, layouts
from meshpar.tree import human_bytes, parse_bytes

USABLE = Fraction(94, 100)
"""The share of a chip's memory that a step may hold; the rest is the runtime's."""
KEYS = (*(f"mesh.{axis}" for axis in AXES), "rules", "parallel.pipeline.kind", "num_microbatches", "model.remat")
"""What a layout decides, and `fix` may hold."""


@dataclass(frozen=True)
class Plan:
    """Layouts of a run on a machine, by the estimates of their traced steps.

    Args:
      at_most: bytes that a device may hold.
    """

    run: Run
    machine: Machine
    found: Found
    at_most: int

    @property
    def ranked(self) -> Sequence[Candidate]:
        """The layouts that fit, the fastest first."""
        return self.found.ranked

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
        }

    def yaml(self) -> str:
        """The config of the best layout, with what the plan says of it in comments."""
        best = self.ranked[0].estimate
        terms = ", ".join(f"{_ms(time)} {term}" for term, time in best.terms.items())
        lines = [
            f"Planned for {self.machine.text}. Estimated from the trace: a step takes {_ms(best.total_s)} ({terms}).",
            f"A device holds {human_bytes(best.total_bytes)} of {human_bytes(self.at_most)}.",
        ]
        return "".join(f"# {line}\n" for line in lines) + to_yaml(self.best)

    def __str__(self) -> str:
        traced = len(self.ranked) + len(self.found.too_big)
        of = f"{self.machine.text}: {self.machine.num_devices} devices"
        lines = [
            f"{of}; {self.found.num_layouts} layouts, {traced} of them traced; nothing was compiled or run",
            f"{'':4}{'step':>10}  {'holds':>10}  {'loses by':32}  layout",
        ]
        best = self.ranked[0]
        for rank, one in enumerate(self.ranked, 1):
            holds = human_bytes(one.estimate.total_bytes)
            lines.append(f"{rank:3} {_ms(one.estimate.total_s):>10}  {holds:>10}  {_loss(one, best):32}  {one.layout}")
        lines.append("")
        lines.append("where the time of the first goes:")
        total = best.estimate.total_s
        lines += [f"  {_ms(time):>10}  {time / total:4.0%}  {term}" for term, time in best.estimate.terms.items()]
        if self.found.too_big:
            least = self.found.too_big[0]
            count = len(self.found.too_big)
            holds = human_bytes(least.estimate.total_bytes)
            lines.append(f"{count} of the traced hold more than {human_bytes(self.at_most)}; the smallest {holds}:")
            lines.append(f"  {least.layout}")
        return "\n".join(lines)


def plan(run: Run, target: str, *, fix: Iterable[str] = (), at_most: str | int | None = None) -> Plan:
    """Finds the fastest layouts of a run on a machine, by estimates from traced steps. Nothing is compiled or run.

    Considered are the sizes of all axes, ZeRO's stages, pipeline schedules, microbatches and remat. A rough estimate
    ranks all layouts; the steps of the best ones are traced.

    Args:
      target: the machine, such as `h100:8x8` or `v5p:4x4x4`.
      fix: `key=value` of a layout that is given: `mesh.tensor=8`, `rules=[fsdp,megatron_sp]`, `num_microbatches=4`,
        `parallel.pipeline.kind=1f1b`, `model.remat=full`.
      at_most: bytes that a device may hold, such as `60GiB`. Default: 94 % of its memory.

    Raises:
      ConfigError: no layout fits, with the closest; or `fix` contradicts itself, the machine or the run.
      MeshError: there is no such machine.

    Example:
      >>> from meshpar import Run, plan
      >>> run = Run(
      ...     model={"kind": "llama", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64},
      ...     data={"kind": "synthetic", "batch_size": 8, "seq_len": 64}, optim={"kind": "adamw", "lr": 1e-3},
      ...     num_steps=10, run_dir="unused",
      ... )
      >>> plan(run, "h100:1x4", fix=["mesh.data=4", "model.remat=none"]).best.mesh.data
      4
    """
    machine = Machine.of(targets.parse(target))
    limit = int(USABLE * round(machine.memory_bytes)) if at_most is None else int(parse_bytes(at_most))
    choices = _fixed(run, machine, list(fix))
    found = search(run, machine, limit, choices)
    if not found.ranked:
        raise ConfigError(_nothing_fits(machine, found, limit))
    return Plan(run, machine, found, limit)


def _fixed(run: Run, machine: Machine, fix: list[str]) -> list[Layout]:
    """The layouts that have every fixed value.

    Raises:
      ConfigError: lists unknown keys; or no layout is left.
    """
    problems = Problems()
    wanted: dict[str, str] = {}
    for text in fix:
        key, _, value = text.partition("=")
        if key not in KEYS or not value:
            near = nearest(key, KEYS)
            problems.add(
                f"--fix {text}", "not a key of a layout", (near and f"did you mean {near}?") or ", ".join(KEYS)
            )
        elif wanted.setdefault(key, value) != value:
            problems.add(f"--fix {text}", f"{key} is fixed to {wanted[key]}, too", "keep one of the two")
    problems.raise_any(ConfigError, "the constraints do not fit each other:")
    found = [layout for layout in layouts(run, machine.num_devices, machine.per_host) if _has(layout, wanted)]
    if not found:
        what = f"no layout of {machine.num_devices} devices has {', '.join(fix)}" if fix else "no layout fits"
        why = f"a batch of {run.data.batch_size} rows of {run.data.seq_len} tokens, and the layers, must divide"
        raise ConfigError(f"{machine.text}: {what}: {why}")
    return found


def _has(layout: Layout, wanted: dict[str, str]) -> bool:
    own = {f"mesh.{axis}": 1 for axis in AXES} | flatten_json(layout.changes)
    own["num_microbatches"] = layout.num_microbatches
    return all(_text(own.get(key)) == _text(value) for key, value in wanted.items())


def _text(value: Any) -> str:
    """A value as a user may write it, without blanks and brackets."""
    words = value if isinstance(value, list) else re.findall(r"[\w.]+", str(value))
    return ",".join(map(str, words))


def _nothing_fits(machine: Machine, found: Found, at_most: int) -> str:
    if not found.too_big:
        why = "`meshpar explain` says why one does not"
        return f"{machine.text}: none of {found.num_layouts} layouts fits this run; {why}"
    least = found.too_big[0]
    lacks = human_bytes(least.estimate.total_bytes - at_most)
    return (
        f"{machine.text}: no layout holds at most {human_bytes(at_most)}; the closest holds"
        f" {human_bytes(least.estimate.total_bytes)}, {lacks} too many:\n  {least.layout}\n"
        "  more devices, a smaller data.batch_size or data.seq_len, or precision.params=bfloat16"
    )


def _loss(one: Candidate, best: Candidate) -> str:
    """The term by which a layout loses most."""
    terms = one.estimate.terms
    more = {term: time - best.estimate.terms.get(term, 0.0) for term, time in terms.items()}
    term = max(more, key=lambda term: more[term])
    if one is best:
        return ""
    if more[term] >= 1e-3 * best.estimate.total_s:
        return f"{_ms(more[term])} {term}"
    hides = one.estimate.beside_s - best.estimate.beside_s
    return f"{_ms(hides)} more to hide" if hides > 0 else "nothing: equal"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.4g} s"


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
