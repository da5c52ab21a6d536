"""The selection of arrays that a run restores from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshpar.config import changed
from meshpar.errors import CheckpointError, Problems, nearest
from meshpar.tree import matching

EVERYTHING = ("**",)
PARAMS = ("params.**",)
SHAPING = ("model", "optim", "precision")
"""The sections of a config that decide which arrays a state has."""


@dataclass(frozen=True)
class Selection:
    """Paths of arrays, each list sorted.

    Args:
      taken: restored from the checkpoint.
      made: initialized by the run.
      unused: in the checkpoint, but not restored.
    """

    taken: list[str]
    made: list[str]
    unused: list[str]


@dataclass(frozen=True)
class Side:
    """The arrays and the config of a checkpoint, or of a run.

    Args:
      arrays: path -> dtype and shape.
      config: as JSON data.
    """

    arrays: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)


def select(saved: Side, wanted: Side, take: Sequence[str], leave: Sequence[str], where: str) -> Selection:
    """Selects the arrays that `take` matches and `leave` does not. Checkpoint and run must agree on each of them.

    Args:
      where: the checkpoint's folder, for the error.

    Raises:
      CheckpointError: lists the globs that match nothing, or each selected array that differs.
    """
    paths = sorted(saved.arrays.keys() | wanted.arrays.keys())
    _check_globs({"take": take, "leave": leave}, paths)
    included = {path for glob in take for path in matching(paths, glob)}
    excluded = {path for glob in leave for path in matching(paths, glob)}
    selected = sorted(included - excluded)
    _check_same(saved, wanted, selected, where, whole=tuple(take) == EVERYTHING and not leave)
    return Selection(
        taken=selected,
        made=sorted(wanted.arrays.keys() - selected),
        unused=sorted(saved.arrays.keys() - selected),
    )


def _check_globs(globs: Mapping[str, Sequence[str]], paths: Sequence[str]) -> None:
    problems = Problems()
    tops = sorted({path.partition(".")[0] for path in paths})
    for key, each in globs.items():
        for glob in each:
            if paths and not matching(paths, glob):
                near = nearest(glob, [*paths, *(f"{top}.**" for top in tops)])
                fix = f"did you mean {near}?" if near else f"there are {', '.join(tops)}"
                problems.add(f"{key}: {glob}", "matches no array of the checkpoint, and none of the run", fix)
    problems.raise_any(CheckpointError, "cannot select what to restore:")


def _check_same(saved: Side, wanted: Side, paths: Sequence[str], where: str, *, whole: bool) -> None:
    differ = [path for path in paths if saved.arrays.get(path) != wanted.arrays.get(path)]
    # The optimizer's arrays have the shapes of the parameters: they are listed only where no parameter differs.
    of_model = [path for path in differ if not path.startswith("opt_state.")]
    problems = Problems()
    changes = changed(saved.config, wanted.config)
    # Another optimizer may have arrays of the same names with another meaning.
    if not differ and not (whole and "optim.kind" in changes):
        return
    for key, (before, now) in changes.items():
        if whole or key.partition(".")[0] in SHAPING:
            problems.add(key, f"{before} in the checkpoint, {now} in this run")
    for path in of_model or differ:
        in_checkpoint = saved.arrays.get(path)
        in_run = wanted.arrays.get(path)
        if in_checkpoint is None:
            problems.add(path, f"{in_run} in this run, missing in the checkpoint")
        elif in_run is None:
            problems.add(path, f"{in_checkpoint} in the checkpoint, unknown to this run")
        else:
            problems.add(path, f"{in_checkpoint} in the checkpoint, {in_run} in this run")
    other = "model" if of_model else "optimizer"
    num = len(of_model or differ)
    count = f": {num} array{'s differ' if num > 1 else ' differs'}" if num else ""
    fix = "run_dir=... makes this a run of its own" if whole else "leave=... excludes what this run initializes itself"
    problems.raise_any(CheckpointError, f"{where} holds another {other}{count}; {fix}:")
