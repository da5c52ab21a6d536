"""What a device holds: every array's dims, rules, local shape and bytes, and the totals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshpar.mesh.layout import describe_sizes
from meshpar.sharding.resolve import Placement
from meshpar.tree import flatten_with_paths


@dataclass(frozen=True)
class Report:
    """The placements of a train state.

    Args:
      arrays: path -> placement, of the parameters as they are stored.
      held: name (parameters, gradients, optimizer) -> bytes a device holds of it.
    """

    arrays: Mapping[str, Placement]
    held: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        arrays = {path: _entry(placement) for path, placement in self.arrays.items()}
        return {"mesh": dict(self._mesh.shape), "arrays": arrays, "bytes_per_device": dict(self.held)}

    def __str__(self) -> str:
        lines = [f"mesh: {describe_sizes(dict(self._mesh.shape))}", ""]
        for path, placement in self.arrays.items():
            lines += [f"{path}  {placement.spec}", *_details(placement)]
        lines += ["", "a device holds"]
        lines += [f"  {name:<12}{human(size):>12}" for name, size in self.held.items()]
        lines += [f"  {'total':<12}{human(sum(self.held.values())):>12}"]
        return "\n".join(lines)

    @property
    def _mesh(self) -> Any:
        return next(iter(self.arrays.values())).mesh


def report(params: Any, gradients: Any, opt_state: Any) -> Report:
    """Reports on three trees of placements."""
    trees = {"parameters": params, "gradients": gradients, "optimizer": opt_state}
    held = {name: sum(p.local_bytes for p in flatten_with_paths(tree).values()) for name, tree in trees.items()}
    return Report(flatten_with_paths(params), held)


def human(size: int) -> str:
    """Bytes for people.

    >>> human(3 * 2**20)
    '3.00 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024  # pyright: ignore[reportAssignmentType]
    raise AssertionError


def _details(placement: Placement) -> list[str]:
    shape = ", ".join(map(str, placement.local_shape))
    lines = [f"    {reason}" for axes, reason in zip(placement.axes, placement.reason, strict=True) if axes]
    copies = _copies(placement)
    whole = f" on each of {copies} devices" if copies > 1 else ""
    return [*lines, f"    local [{shape}]  {human(placement.local_bytes)}{whole}"]


def _copies(placement: Placement) -> int:
    """How many devices hold the same part."""
    return placement.mesh.size * placement.local_bytes // max(placement.spec.num_bytes, 1)


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
        "copies": _copies(placement),
    }
