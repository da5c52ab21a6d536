"""Narrows a space of many layouts to those of the meshes that promise most, so that a large machine is planned soon."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from meshpar.planning.machine import Machine
from meshpar.planning.rough import Probes
from meshpar.planning.space import Layout

MANY = 5_000
"""A space with more layouts is narrowed."""
MESHES = 50
"""How many meshes are left: of the five best of six spaces, all were among the 11 with the fastest samples."""


def narrowed(everything: Sequence[Layout], probes: Probes, machine: Machine, at_most: float) -> Sequence[Layout]:
    """All layouts of the meshes whose samples are the fastest that may fit; everything, if that is not much.

    The samples of a mesh are its layouts that hold the least, by each kind of remat: what a mesh sends and computes
    depends little on its other settings, and what it holds decides whether it may be used at all.
    """
    if len(everything) <= MANY:
        return everything
    of_mesh: dict[object, list[Layout]] = defaultdict(list)
    for layout in everything:
        of_mesh[layout.sizes].append(layout)
    best: dict[object, tuple[bool, float]] = {}
    for sizes, layouts in of_mesh.items():
        samples = _samples(layouts)
        held = [probes.states_bytes(one) + probes.step_bytes(one) for one in samples]
        fitting = [one for one, size in zip(samples, held, strict=True) if size <= at_most]
        times = [probes.work(one).on(machine).total_s for one in fitting]
        best[sizes] = (False, min(times)) if times else (True, float(min(held)))
    kept = {*sorted(best, key=best.__getitem__)[:MESHES]}
    return [layout for layout in everything if layout.sizes in kept]


def _samples(layouts: Sequence[Layout]) -> list[Layout]:
    """For each setting of remat, the layout of a mesh that is sharded most, in a middle number of microbatches."""
    found: dict[object, list[Layout]] = defaultdict(list)
    sharding = layouts[-1].sharding
    schedule = layouts[0].schedule
    for one in layouts:
        if (one.sharding, one.schedule) == (sharding, schedule):
            found[one.remat].append(one)
    return [alike[len(alike) // 2] for alike in found.values()]
