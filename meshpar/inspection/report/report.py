"""The report of `explain`: dims, rules, local shape and bytes of each parameter, and the totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshpar.errors import ConfigError, nearest
from meshpar.inspection.report.picture import Picture, stacked
from meshpar.inspection.report.text import selected_lines
from meshpar.mesh.layout import AXES, describe_sizes
from meshpar.partition.moved_values import MovedValue
from meshpar.sharding.resolve import Placement
from meshpar.tree import flatten_with_paths, human_bytes, matching


@dataclass(frozen=True)
class Report:
    """The report of `explain`: the placements of the parameters, and the bytes of the model's states on a device.

    Args:
      arrays: path -> placement, of the parameters as they are stored.
      held: name (parameters, gathered, gradients, optimizer) -> the largest number of bytes on a device.
      selected: key of the config -> the implementation that it selects on this mesh.
      host: the bytes that a device stores in its host's memory.
      updates: path -> what updates the parameter, as text.
      drawn: whether the text draws the arrays.
      activations: the activations of a partitioned model that a forward pass moves; None if they are not reported.
      attention: what computes each attention of a partitioned model.
    """

    arrays: Mapping[str, Placement]
    held: Mapping[str, int]
    selected: Mapping[str, str] = field(default_factory=dict)
    host: int = 0
    updates: Mapping[str, str] = field(default_factory=dict)
    drawn: bool = False
    activations: tuple[MovedValue, ...] | None = None
    attention: tuple[str, ...] = ()

    def only(self, glob: str) -> Report:
        """The report on the arrays whose paths match a glob, with a picture of each.

        Raises:
          ConfigError: no path matches.
        """
        found = matching(self.arrays, glob)
        if not found:
            near = nearest(glob, self.arrays)
            raise ConfigError(f"no parameter matches {glob!r}" + (f"; did you mean {near}?" if near else ""))
        return replace(self, arrays={path: self.arrays[path] for path in found}, selected={}, drawn=True)

    def svg(self) -> str:
        """The pictures of the arrays, as one SVG document."""
        return stacked(Picture(path, placement) for path, placement in self.arrays.items())

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        arrays = {path: _entry(placement) | self._update(path) for path, placement in self.arrays.items()}
        return {
            "mesh": self._sizes,
            "arrays": arrays,
            "bytes_per_device": dict(self.held),
            "host_bytes_per_device": self.host,
            "selected": dict(self.selected),
            **({} if self.activations is None else {"activations": [one.as_json() for one in self.activations]}),
            **({"attention": list(self.attention)} if self.attention else {}),
        }

    def __str__(self) -> str:
        lines = [f"mesh: {describe_sizes(self._sizes)}", ""]
        for path, placement in self.arrays.items():
            lines += [f"{path}  {placement.spec}", *_details(placement)]
            if path in self.updates:
                lines.append(f"    {self.updates[path]}")
            if self.drawn:
                lines += ["", Picture(path, placement).text(), ""]
        if lines[-1]:
            lines.append("")
        if self.selected:
            lines += [*selected_lines(self.selected), ""]
        lines.append("a device holds")
        lines += [f"  {name:<12}{human_bytes(size):>12}" for name, size in self.held.items()]
        lines += [f"  {'total':<12}{human_bytes(sum(self.held.values())):>12}"]
        if self.host:
            lines += ["and in its host's memory", f"  {'optimizer':<12}{human_bytes(self.host):>12}"]
        if self.activations is not None:
            lines += ["", *activation_lines(self.activations), *self.attention]
        return "\n".join(lines)

    def _update(self, path: str) -> dict[str, str]:
        return {"update": self.updates[path]} if path in self.updates else {}

    @property
    def _sizes(self) -> dict[str, int]:
        """The sizes of the mesh's axes."""
        return dict(next(iter(self.arrays.values())).mesh.shape)


def report(
    params: Any,
    held: Mapping[str, int],
    selected: Mapping[str, str],
    host: int = 0,
    updates: Mapping[str, str] | None = None,
) -> Report:
    """A `Report` on a tree of placements, the bytes on a device by name, and the implementations that are selected."""
    held = {name: size for name, size in held.items() if size}
    return Report(flatten_with_paths(params), held, selected, host, updates or {})


def activation_lines(activations: Sequence[MovedValue]) -> list[str]:
    """The activations that a forward pass moves, each with its line in the user's code."""
    inside = "what operations send inside, such as experts and attention of shared rows, is listed by meshpar inspect"
    if not activations:
        return ["a forward pass moves no activations between operations", inside]
    total = human_bytes(sum(one.sent for one in activations))
    heading = f"a forward pass moves these activations between operations, {total} sent by a device"
    return [heading, *map(str, activations), inside]


def _details(placement: Placement) -> list[str]:
    shape = ", ".join(map(str, placement.local_shape))
    # A dim that is not sharded needs no line, unless the user wrote its rule.
    reasons = zip(placement.axes, placement.reason, strict=True)
    lines = [f"    {reason}" for axes, reason in reasons if axes or "(rules." in reason]
    copies = placement.copies(AXES)
    whole = f" on each of {copies} devices" if copies > 1 else ""
    return [*lines, f"    local [{shape}]  {human_bytes(placement.local_bytes)}{whole}"]


def _entry(placement: Placement) -> dict[str, Any]:
    spec = placement.spec
    return {
        "shape": list(spec.shape),
        "dtype": str(spec.dtype),
        "dims": list(spec.dims),
        "rules": list(placement.reason),
        "spec": [list(axes) for axes in placement.axes],
        "local_shape": list(placement.local_shape),
        "bytes_per_device": placement.local_bytes,
        "copies": placement.copies(AXES),
    }
