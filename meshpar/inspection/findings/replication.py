"""Finds arrays that every device holds whole although they could be sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshpar.inspection.findings.finding import Finding
from meshpar.inspection.findings.planned import Planned
from meshpar.inspection.program.arguments import Passed
from meshpar.inspection.program.shardings import spec_text
from meshpar.tree import human_bytes


def find_replicated(passed: Iterable[Passed], planned: Planned, threshold_bytes: int) -> Iterator[Finding]:
    """Arguments and outputs of at least `threshold_bytes` whose replication is not planned."""
    for one in passed:
        if one.is_replicated and one.num_bytes >= threshold_bytes and not planned.is_whole(one.path):
            num = len(one.sharding.device_set)
            what = (
                f"each of {num} devices holds the whole of {one.path}, {list(one.shape)}, {human_bytes(one.num_bytes)}"
            )
            dims = planned.dims.get(one.path)
            if dims:
                sharded = f"add a rule that shards one of {', '.join(dims)}"
                fix = f"{sharded}, or set rules.{dims[-1]}=[] to replicate it on purpose"
            else:
                fix = _sharding(one)
            yield Finding("replication", what, one.path, one.num_bytes, fix)


def _sharding(one: Passed) -> str:
    """Proposes to shard the dim that the axes of the mesh divide into the most shards."""
    mesh = getattr(one.sharding, "mesh", None)
    sizes = {} if mesh is None else {axis: size for axis, size in mesh.shape.items() if size > 1}
    best: tuple[int, int, tuple[str, ...]] = (1, 0, ())
    for dim, size in enumerate(one.shape):
        axes, shards = _dividing(size, sizes)
        best = max(best, (shards, -dim, axes))
    if not best[2]:
        return "no axis divides any dim of it: choose sizes that the mesh divides"
    spec = (*((),) * -best[1], best[2])
    saved = human_bytes(one.num_bytes - one.num_bytes // best[0])
    return f"shard it, for example by {spec_text(spec)}, which saves {saved} on each device"


def _dividing(size: int, sizes: dict[str, int]) -> tuple[tuple[str, ...], int]:
    """The axes that together divide a dim, in the order of the mesh, and the number of shards."""
    axes = ()
    shards = 1
    for axis, count in sizes.items():
        if size % (shards * count) == 0:
            axes = (*axes, axis)
            shards *= count
    return axes, shards
