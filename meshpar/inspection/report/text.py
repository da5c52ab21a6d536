"""Renders an inspection as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from meshpar.inspection.report.places import places, short_source, times_text
from meshpar.inspection.report.plain import PlainFinding, PlainInspection
from meshpar.inspection.report.table import table
from meshpar.mesh.layout import describe_sizes
from meshpar.tree import human_bytes

_MAX_FINDINGS = 8


def text(report: PlainInspection) -> str:
    """The communication, FLOPs and memory of a device in one call of a program, as text."""
    parts = ["a device, in one step"]
    if report.mesh:
        parts.append(f"mesh: {describe_sizes(report.mesh)}")
    parts += [_collectives(report), _bytes_per_axis(report)]
    parts += [f"matrix products: {report.flops:,} FLOPs", _memory(report)]
    if states := report.model_states:
        total = human_bytes(sum(states.values()))
        parts.append(f"model states, in closed form, {total}\n{_sizes(states)}")
    if report.selected:
        parts.append("\n".join(selected_lines(report.selected)))
    for title, is_argument in (("largest arguments", True), ("largest temporaries", False)):
        arrays = [one for one in report.largest if one.is_argument == is_argument]
        rows = [[human_bytes(one.num_bytes), one.array, one.name, short_source(one.source)] for one in arrays]
        parts.append(f"{title}\n{table(None, rows)}")
    if report.opaque:
        parts.append(f"custom calls, which are not counted: {', '.join(report.opaque)}")
    if report.findings:
        parts.append(_findings(report.findings))
    return "\n\n".join(parts)


def selected_lines(selected: Mapping[str, str]) -> list[str]:
    """The implementations that keys of a config select, under a heading."""
    each = (f"  {key}  {what}".replace("; on a ", "\n    on a ").splitlines() for key, what in selected.items())
    return ["selected", *(line for lines in each for line in lines)]


def _collectives(report: PlainInspection) -> str:
    """A line for each place in the code that communicates, most bytes first."""
    found = places(report.collectives)
    rows = []
    for one in found:
        kind = f"{one.kind} in a branch" if one.in_branch else one.kind
        size = human_bytes(one.sent_bytes)
        rows.append([kind, one.axes, times_text(one.times), size, one.what, short_source(one.source)])
    total = human_bytes(sum(one.sent_bytes for one in found))
    return f"sends {total}\n" + table(["", "axes", "times", "bytes", "what", "where"], rows)


def _bytes_per_axis(report: PlainInspection) -> str:
    columns = {"bytes": report.sent_bytes_per_axis}
    if report.traced_bytes_per_axis:
        columns["as traced"] = report.traced_bytes_per_axis
    every = dict.fromkeys(axes for column in columns.values() for axes in column)
    rows = [[axes, *(f"{column.get(axes, 0):,}" for column in columns.values())] for axes in every]
    return table(["over", *columns], rows)


def _memory(report: PlainInspection) -> str:
    memory = report.memory
    held = f"holds {human_bytes(memory.total)}{' at its peak' if memory.peak else ' at most'}\n{_sizes(memory.kinds())}"
    return f"{held}\n\nholds {human_bytes(memory.host)} of temporaries in the host's memory" if memory.host else held


def _sizes(sizes: Mapping[str, int]) -> str:
    return table(None, [[name, human_bytes(size)] for name, size in sizes.items() if size])


def _findings(findings: tuple[PlainFinding, ...]) -> str:
    lines = ["findings"]
    for one in findings[:_MAX_FINDINGS]:
        cost = "" if one.bytes is None else human_bytes(one.bytes)
        lines += [f"  {one.kind}  {cost}", f"    {one.what}"]
        lines += [f"    where: {short_source(one.where)}", f"    fix: {one.fix}"]
    if len(findings) > _MAX_FINDINGS:
        lines.append(f"  and {len(findings) - _MAX_FINDINGS} more")
    return "\n".join(lines)
