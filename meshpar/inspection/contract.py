"""Contracts: what a compiled program may send and hold, declared before it runs.

`expects:` in a config states limits; a program that goes beyond one of them is refused. Beside them stands the closed
form of the presets: a step of the manual lowering that sends more bytes over any axes is reported, unasked.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import ClassVar

import pydantic

from meshpar.config import Config, Count
from meshpar.errors import Problems
from meshpar.inspection.inspect import Inspection
from meshpar.inspection.program.hlo import Collective, total_sent_bytes
from meshpar.inspection.report.places import axes_name, short_source
from meshpar.mesh.layout import AXES
from meshpar.tree import human_bytes, parse_bytes

Axes = tuple[str, ...]
Traffic = Mapping[Axes, Fraction]

_BY_TRACE = re.compile(r"traced(?:\s*\*\s*(\d+(?:\.\d+)?))?$")


class Allowed(Config):
    """Limits on one kind of collective. A bare number means `times`."""

    shorthand: ClassVar = "times"
    times: Count | None = None
    """Executions in a step, at most."""
    per_layer: Count | None = None
    """Executions for each parameter, layer and microbatch, at most."""
    axes: tuple[str, ...] | None = None
    """The axes over which it may go; over no others."""

    @pydantic.field_validator("axes")
    @classmethod
    def _known(cls, axes: Axes | None) -> Axes | None:
        _check_axes(axes or ())
        return axes


class Contract(Config):
    """What the compiled step may do. What is not stated is not limited."""

    all_gather: Allowed | None = None
    reduce_scatter: Allowed | None = None
    all_reduce: Allowed | None = None
    all_to_all: Allowed | None = None
    collective_permute: Allowed | None = None
    bytes_per_axis: dict[str, str | int] = pydantic.Field(default_factory=dict)
    """`tensor` or `fsdp, tensor` -> bytes a device may send over them: 1000, 40MiB, traced, traced * 1.01."""
    peak_bytes: str | int | None = None
    """Bytes that a device may hold."""

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

    def check(self, told: Inspection, traced: Traffic | None, layer_passes: int) -> Problems:
        """Where a program goes beyond what is declared.

        Args:
          traced: what the presets say that it sends; None if they do not say.
          layer_passes: layers times microbatches.
        """
        problems = Problems()
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute"):
            if (allowed := getattr(self, kind)) is not None:
                found = [one for one in told.collectives if one.kind == kind]
                _check_kind(f"expects.{kind}", allowed, found, layer_passes, problems)
        for names, text in self.bytes_per_axis.items():
            form = None if traced is None else traced.get(_axes(names), Fraction(0))
            _check_bytes(f"expects.bytes_per_axis.{names}", told, _axes(names), text, form, problems)
        if self.peak_bytes is not None and told.memory.total > _limit(self.peak_bytes, None):
            what = f"the step holds {human_bytes(told.memory.total)}, more than {self.peak_bytes}"
            held = sorted(told.largest, key=lambda held: held.num_bytes, reverse=True)
            arrays = [f"{human_bytes(one.num_bytes)}  {one.array}  {one.name}" for one in held]
            problems.add("expects.peak_bytes", _lines(what, arrays))
        return problems


def beyond(told: Inspection, traced: Traffic) -> Problems:
    """Where a compiled program sends more than the traced one says."""
    problems = Problems()
    for axes in dict.fromkeys(one.axes for one in told.collectives):
        form = traced.get(axes or (), Fraction(0))
        _check_bytes(f"over {axes_name(axes)}", told, axes, "traced", form, problems)
    return problems


def _check_kind(where: str, allowed: Allowed, found: list[Collective], layer_passes: int, problems: Problems) -> None:
    found = sorted(found, key=lambda one: one.times * one.sent_bytes, reverse=True)
    times = sum(one.times for one in found)
    if allowed.times is not None and times > allowed.times:
        problems.add(f"{where}.times", _lines(f"runs {times} times, more than {allowed.times}", map(_line, found)))
    strays = [one for one in found if allowed.axes is not None and not set(one.axes or ("?",)) <= set(allowed.axes)]
    if strays:
        problems.add(
            f"{where}.axes", _lines(f"runs over other axes than {', '.join(allowed.axes or ())}", map(_line, strays))
        )
    often = _too_often(found, allowed.per_layer, layer_passes)
    if often:
        what = f"more than {allowed.per_layer} in each of {layer_passes} passes of a layer"
        problems.add(f"{where}.per_layer", _lines(what, often))


def _too_often(found: list[Collective], per_layer: int | None, layer_passes: int) -> list[str]:
    """The tensors with which a collective is concerned in more executions than a layer may have."""
    times: Counter[str] = Counter()
    for one in found:
        times.update(dict.fromkeys(one.tensors, one.times))
    limit = math.inf if per_layer is None else per_layer * layer_passes
    return [f"{tensor}  {count}x" for tensor, count in times.most_common() if count > limit]


def _check_bytes(
    where: str, told: Inspection, axes: Axes | None, text: str | int, form: Fraction | None, problems: Problems
) -> None:
    if form is None and _BY_TRACE.match(str(text)):
        problems.add(where, "what this step should send is not known: GSPMD chooses", "a number of bytes")
        return
    found = [one for one in told.collectives if one.axes == axes]
    sent, limit = total_sent_bytes(found), _limit(text, form)
    if sent > limit:
        said = f" ({text})" if _BY_TRACE.match(str(text)) else ""
        what = f"sends {float(sent):,.0f} bytes, more than {float(limit):,.0f}{said}"
        found.sort(key=lambda one: one.times * one.sent_bytes, reverse=True)
        problems.add(where, _lines(what, map(_line, found)))


def _limit(text: str | int, form: Fraction | None) -> Fraction:
    if str(text).startswith("closed_form"):
        raise ValueError(f"closed_form is called traced now: {str(text).replace('closed_form', 'traced')}")
    if (match := _BY_TRACE.match(str(text))) and form is not None:
        return form * Fraction(match[1] or 1)
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{error}{', traced * 1.01' * (form is not None)}") from None


def _check_axes(axes: Iterable[str]) -> None:
    unknown = [axis for axis in axes if axis not in AXES]
    if unknown:
        raise ValueError(f"the mesh has no axis {unknown[0]!r}; its axes are {', '.join(AXES)}")


def _axes(names: str) -> Axes:
    return tuple(name.strip() for name in names.split(","))


def _line(one: Collective) -> str:
    what = ", ".join(one.tensors) or ", ".join(map(str, one.arrays))
    over = axes_name(one.axes)
    size = human_bytes(float(one.times * one.sent_bytes))
    return f"{one.kind} over {over}  {one.times}x  {size}  {what}  {short_source(one.source)}".rstrip()


def _lines(what: str, rows: Iterable[str], most: int = 8) -> str:
    """What is wrong, and below it the first of the rows that show it."""
    rows = list(rows)
    shown = rows[:most] + ([f"... and {len(rows) - most} more"] if len(rows) > most else [])
    return "\n      ".join([f"{what}:", *shown])
