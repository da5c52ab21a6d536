"""What is taken from a checkpoint, by path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshpar.config import changed
from meshpar.errors import CheckpointError, Problems, nearest
from meshpar.tree import matching

EVERYTHING = ("**",)
PARAMS = ("params.**",)
SHAPING = ("model", "optim", "precision")
"""The sections of a config on which it depends what arrays there are."""


@dataclass(frozen=True)
class Selection:
    """Arrays by where they are: each list in order of paths.

    Args:
      taken: in the checkpoint and in the run, and chosen.
      made: in the run, and not taken: they are as the run makes them.
      unused: in the checkpoint, and not taken.
    """

    taken: list[str]
    made: list[str]
    unused: list[str]


@dataclass(frozen=True)
class Side:
    """A checkpoint, or a run.

    Args:
      arrays: path -> type and shape.
      config: JSON data.
    """

    arrays: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)


def select(saved: Side, wanted: Side, take: Sequence[str], leave: Sequence[str], where: str) -> Selection:
    """Chooses what `take` matches and `leave` does not: of this, checkpoint and run must have the same.

    Args:
      where: the checkpoint, for the error.

    Raises:
      CheckpointError: lists the globs that match nothing, or each array that differs.
    """
    paths = sorted(saved.arrays.keys() | wanted.arrays.keys())
    _check_globs({"take": take, "leave": leave}, paths)
    left = set(_matched(paths, leave))
    chosen = [path for path in _matched(paths, take) if path not in left]
    _check_same(saved, wanted, chosen, where, whole=tuple(take) == EVERYTHING and not leave)
    others = [path for path in paths if path not in set(chosen)]
    made, unused = ([path for path in others if path in side.arrays] for side in (wanted, saved))
    return Selection(chosen, made, unused)


def _matched(paths: Sequence[str], globs: Iterable[str]) -> list[str]:
    found = {path for glob in globs for path in matching(paths, glob)}
    return [path for path in paths if path in found]


def _check_globs(globs: Mapping[str, Sequence[str]], paths: Sequence[str]) -> None:
    problems = Problems()
    tops = sorted({path.partition(".")[0] for path in paths})
    for key, each in globs.items():
        for glob in each:
            if paths and not matching(paths, glob):
                near = nearest(glob, [*paths, *(f"{top}.**" for top in tops)])
                fix = f"did you mean {near}?" if near else f"there are {', '.join(tops)}"
                problems.add(f"{key}: {glob}", "matches no array of the checkpoint, and none of the run", fix)
    problems.raise_any(CheckpointError, "what to restore cannot be told:")


def _check_same(saved: Side, wanted: Side, paths: Sequence[str], where: str, *, whole: bool) -> None:
    differ = [path for path in paths if saved.arrays.get(path) != wanted.arrays.get(path)]
    # The optimizer's arrays are like the model's: where those differ, they say nothing new.
    of_model = [path for path in differ if not path.startswith("opt_state.")]
    problems, news = Problems(), changed(saved.config, wanted.config)
    # Two optimizers may keep arrays of the same names that mean something else.
    if not differ and not (whole and news.keys() & {"optim.kind"}):
        return
    for key, (before, now) in news.items():
        if whole or key.partition(".")[0] in SHAPING:
            problems.add(key, f"{before} in the checkpoint, {now} in this run")
    for path in of_model or differ:
        problems.add(path, _misfit(saved.arrays.get(path), wanted.arrays.get(path)))
    other, num = "model" if of_model else "optimizer", len(of_model or differ)
    fix = "run_dir=... makes this a run of its own" if whole else "leave those that this run makes itself"
    by = f", by {num} array{'s' * (num > 1)}" if num else ""
    problems.raise_any(CheckpointError, f"{where} is of another {other}{by}; {fix}:")


def _misfit(saved: str | None, wanted: str | None) -> str:
    if saved is None:
        return f"{wanted} in this run, missing in the checkpoint"
    return f"{saved} in the checkpoint, " + (f"{wanted} in this run" if wanted else "unknown to this run")
