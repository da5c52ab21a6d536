"""Contracts limit the communication and the memory of a compiled program.

A program that exceeds a limit of `contract:` in the config is refused. Independently of `contract:`, a warning reports
a step of the manual lowering that sends more bytes over any axes than its traced program.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import pydantic

from meshpar.config import Coerced, Config, Count, default
from meshpar.errors import Problems
from meshpar.inspection.inspect import Inspection
from meshpar.inspection.program.hlo import Collective, total_sent_bytes
from meshpar.inspection.report.places import axes_name, short_source, times_text
from meshpar.mesh.layout import AXES
from meshpar.mesh.varying import Axes
from meshpar.tree import human_bytes, parse_bytes

Traffic = Mapping[Axes, Fraction]

_MAX_ROWS = 8
_BY_TRACE = re.compile(r"traced(?:\s*\*\s*(\d+(?:\.\d+)?))?$")


class Allowed(Config):
    """Limits on one kind of collective. A bare number sets `times`."""

    shorthand: ClassVar = "times"
    times: Count | None = None
    """The maximum number of executions in a step."""
    per_layer: Count | None = None
    """The maximum number of executions for each parameter, layer and microbatch."""
    axes: Coerced[Axes | None, list[str]] = default(None)
    """The only axes over which it may run."""

    @pydantic.field_validator("axes")
    @classmethod
    def _known(cls, axes: Axes | None) -> Axes | None:
        _check_axes(axes or ())
        return axes


Limit = Coerced[Allowed | None, int | dict[str, Any]]


class Contract(Config):
    """Limits on the compiled step. By default nothing is limited."""

    all_gather: Limit = default(None)
    """Limits on all-gathers."""
    reduce_scatter: Limit = default(None)
    """Limits on reduce-scatters."""
    all_reduce: Limit = default(None)
    """Limits on all-reduces."""
    all_to_all: Limit = default(None)
    """Limits on all-to-alls."""
    collective_permute: Limit = default(None)
    """Limits on permutes."""
    bytes_per_axis: dict[str, str | int] = pydantic.Field(default_factory=dict)
    """`tensor` or `fsdp, tensor` -> bytes that a device may send over these axes: 1000, 40MiB, or traced * 1.01, times
    those of the traced step."""
    peak_bytes: str | int | None = None
    """The maximum number of bytes on a device, such as 80MiB."""

    @pydantic.field_validator("bytes_per_axis")
    @classmethod
    def _readable(cls, limits: dict[str, str | int]) -> dict[str, str | int]:
        for names, limit in limits.items():
            _check_axes(_axes(names))
            _limit(limit, Fraction(0))
        return limits

    @pydantic.field_validator("peak_bytes")
    @classmethod
    def _a_number(cls, limit: str | int | None) -> str | int | None:
        if limit is not None:
            _limit(limit, None)
        return limit

    def check(self, inspection: Inspection, traced: Traffic | None, layer_passes: int) -> Problems:
        """The limits that a program exceeds.

        Args:
          traced: the bytes of the traced step, by axes; None if GSPMD adds collectives to it.
          layer_passes: layers times microbatches.
        """
        problems = Problems()
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute"):
            if (allowed := getattr(self, kind)) is not None:
                found = [one for one in inspection.collectives if one.kind == kind]
                _check_kind(f"contract.{kind}", allowed, found, layer_passes, problems)
        for names, text in self.bytes_per_axis.items():
            form = None if traced is None else traced.get(_axes(names), Fraction(0))
            _check_bytes(f"contract.bytes_per_axis.{names}", inspection.collectives, _axes(names), text, form, problems)
        total = inspection.memory.total
        if self.peak_bytes is not None and total > _limit(self.peak_bytes, None):
            largest = sorted(inspection.largest, key=lambda held: held.num_bytes, reverse=True)
            arrays = [f"{human_bytes(one.num_bytes)}  {one.array}  {one.name}" for one in largest]
            what = f"the step holds {human_bytes(total)}, more than {self.peak_bytes}"
            problems.add("contract.peak_bytes", _lines(what, arrays))
        return problems


def beyond(collectives: Sequence[Collective], traced: Traffic) -> Problems:
    """A problem for all axes over which a compiled program sends more bytes than the traced program."""
    problems = Problems()
    for axes in dict.fromkeys(one.axes for one in collectives):
        form = traced.get(axes or (), Fraction(0))
        _check_bytes(f"over {axes_name(axes)}", collectives, axes, "traced", form, problems)
    return problems


def _check_kind(where: str, allowed: Allowed, found: list[Collective], layer_passes: int, problems: Problems) -> None:
    found = sorted(found, key=lambda one: one.total_bytes, reverse=True)
    times = sum(one.times for one in found)
    if allowed.times is not None and times > allowed.times:
        problems.add(f"{where}.times", _lines(f"runs {times} times, more than {allowed.times}", map(_line, found)))
    strays = [one for one in found if allowed.axes is not None and not set(one.axes or ("?",)) <= set(allowed.axes)]
    if strays:
        what = f"runs over other axes than {', '.join(allowed.axes or ())}"
        problems.add(f"{where}.axes", _lines(what, map(_line, strays)))
    if allowed.per_layer is None:
        return
    counts: dict[str, Fraction] = defaultdict(Fraction)
    for one in found:
        for tensor in dict.fromkeys(one.tensors):
            counts[tensor] += one.times
    limit = allowed.per_layer * layer_passes
    most = sorted(counts.items(), key=lambda item: item[1], reverse=True)
    exceeding = [f"{tensor}  {times_text(count)}" for tensor, count in most if count > limit]
    if exceeding:
        what = f"more than {allowed.per_layer} in each of {layer_passes} passes of a layer"
        problems.add(f"{where}.per_layer", _lines(what, exceeding))


def _check_bytes(
    where: str, collectives: Sequence[Collective], axes: Axes | None, text: str | int, form: Fraction | None,
    problems: Problems,
) -> None:  # fmt: skip
    is_traced = _BY_TRACE.match(str(text))
    if form is None and is_traced:
        what = "the traced bytes of this step are unknown, because GSPMD chooses its collectives"
        problems.add(where, what, "set a number of bytes, such as 40MiB")
        return
    found = [one for one in collectives if one.axes == axes]
    sent = total_sent_bytes(found)
    limit = _limit(text, form)
    if sent > limit:
        source = f" ({text})" if is_traced else ""
        what = f"sends {float(sent):,.0f} bytes, more than {float(limit):,.0f}{source}"
        found.sort(key=lambda one: one.total_bytes, reverse=True)
        problems.add(where, _lines(what, map(_line, found)))


def _limit(text: str | int, form: Fraction | None) -> Fraction:
    if str(text).startswith("closed_form"):
        raise ValueError(f"closed_form is called traced now: {str(text).replace('closed_form', 'traced')}")
    if (match := _BY_TRACE.match(str(text))) and form is not None:
        return form * Fraction(match[1] or 1)
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{error}, traced * 1.01" if form is not None else str(error)) from None


def _check_axes(axes: Iterable[str]) -> None:
    unknown = [axis for axis in axes if axis not in AXES]
    if unknown:
        raise ValueError(f"the mesh has no axis {unknown[0]!r}; its axes are {', '.join(AXES)}")


def _axes(names: str) -> Axes:
    return tuple(name.strip() for name in names.split(","))


def _line(one: Collective) -> str:
    what = ", ".join(one.tensors) or ", ".join(map(str, one.arrays))
    over = axes_name(one.axes, one.is_in_parts)
    size = human_bytes(float(one.total_bytes))
    return f"{one.kind} over {over}  {times_text(one.times)}  {size}  {what}  {short_source(one.source)}".rstrip()


def _lines(what: str, rows: Iterable[str]) -> str:
    """The problem, with the first rows that show it below."""
    rows = list(rows)
    lines = [f"{what}:", *rows[:_MAX_ROWS]]
    if len(rows) > _MAX_ROWS:
        lines.append(f"... and {len(rows) - _MAX_ROWS} more")
    return "\n      ".join(lines)
