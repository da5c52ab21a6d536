"""The selection of arrays that a run restores from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshpar.errors import CheckpointError, Problems, suggestion
from meshpar.tree import matching

EVERYTHING = ("**",)
PARAMS = ("params.**",)
AVERAGES = ("opt_state.ema.**",)
"""The averages of parameters, see `optim.ema`."""
SHAPING = ("model", "optim", "precision")
"""The sections of a config that decide which arrays a state has."""


@dataclass(frozen=True)
class Selection:
    """Paths of arrays, each list sorted.

    Args:
      restored: arrays that the run restores from the checkpoint.
      initialized: arrays that the run initializes itself.
      ignored: arrays of the checkpoint that are not restored.
    """

    restored: list[str]
    initialized: list[str]
    ignored: list[str]


def select(
    saved: Mapping[str, str],
    wanted: Mapping[str, str],
    include: Sequence[str],
    exclude: Sequence[str],
    changes: Mapping[str, Sequence[Any]],
    where: str,
) -> Selection:
    """Selects the arrays that `include` matches and `exclude` does not. Checkpoint and run must agree on each of them.

    Args:
      saved, wanted: path -> dtype and shape, in the checkpoint and in the run.
      changes: key of the config -> its values in the checkpoint and in the run, if they differ.
      where: the checkpoint's folder, for the error.

    Raises:
      CheckpointError: lists the globs that match nothing, or each selected array that differs.
    """
    paths = sorted(saved.keys() | wanted.keys())
    _check_globs({"include": include, "exclude": exclude}, paths)
    included = {path for glob in include for path in matching(paths, glob)}
    excluded = {path for glob in exclude for path in matching(paths, glob)}
    selected = sorted(included - excluded)
    differ = {
        path: _difference(saved.get(path), wanted.get(path)) for path in selected if saved.get(path) != wanted.get(path)
    }
    _check_same(differ, changes, where, whole=tuple(include) == EVERYTHING and not exclude)
    return Selection(selected, sorted(wanted.keys() - selected), sorted(saved.keys() - selected))


def _check_globs(globs: Mapping[str, Sequence[str]], paths: Sequence[str]) -> None:
    problems = Problems()
    tops = sorted({path.partition(".")[0] for path in paths})
    for key, each in globs.items():
        for glob in each:
            if paths and not matching(paths, glob):
                fix = suggestion(glob, [*paths, *(f"{top}.**" for top in tops)], f"there are {', '.join(tops)}")
                problems.add(f"{key}: {glob}", "matches no array of the checkpoint, and none of the run", fix)
    problems.raise_any(CheckpointError, "cannot select what to restore:")


def _difference(saved: str | None, wanted: str | None) -> str:
    if saved is None:
        return f"{wanted} in this run, missing in the checkpoint"
    in_run = f"{wanted} in this run" if wanted else "unknown to this run"
    return f"{saved} in the checkpoint, {in_run}"


def _check_same(differ: Mapping[str, str], changes: Mapping[str, Sequence[Any]], where: str, *, whole: bool) -> None:
    """Raises if arrays differ, or, for a whole state, the kind of the optimizer. `differ` is path -> difference."""
    # The optimizer's arrays have the shapes of the parameters: they are listed only where no parameter differs.
    of_model = [path for path in differ if "opt_state" not in path.split(".")]
    problems = Problems()
    # Another optimizer may have arrays of the same names with another meaning.
    if not differ and not (whole and "optim.kind" in changes):
        return
    for key, (before, now) in changes.items():
        if whole or key.partition(".")[0] in SHAPING:
            problems.add(key, f"{before} in the checkpoint, {now} in this run")
    for path in of_model or differ:
        problems.add(path, differ[path])
    same_params = bool(of_model) and not any(path.startswith("params.") for path in of_model)
    other = "state beside the same parameters" if same_params else "model" if of_model else "optimizer"
    num = len(of_model or differ)
    count = f": {num} array{'s differ' if num > 1 else ' differs'}" if num else ""
    fix = (
        "run_dir=... makes this a run of its own"
        if whole
        else "exclude=... leaves out what this run initializes itself"
    )
    if whole and same_params:
        fix += ", and init.from_checkpoint begins it with these parameters"
    problems.raise_any(CheckpointError, f"{where} holds another {other}{count}; {fix}:")
