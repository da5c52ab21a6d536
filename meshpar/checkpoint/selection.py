"""What is taken from a checkpoint, by path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshpar.errors import CheckpointError, Problems, nearest
from meshpar.tree import matching

EVERYTHING = ("**",)


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


def select(
    saved: Mapping[str, str], wanted: Mapping[str, str], take: Sequence[str], leave: Sequence[str], where: str
) -> Selection:
    """Chooses what `take` matches and `leave` does not: of this, checkpoint and run must have the same.

    Args:
      saved, wanted: path -> type and shape, in the checkpoint and in the run.
      where: the checkpoint, for the error.

    Raises:
      CheckpointError: lists the globs that match nothing, or each array that differs.
    """
    paths = sorted(saved.keys() | wanted.keys())
    _check_globs({"take": take, "leave": leave}, paths)
    left = set(_matched(paths, leave))
    chosen = [path for path in _matched(paths, take) if path not in left]
    _check_same(saved, wanted, chosen, where, whole=tuple(take) == EVERYTHING and not leave)
    taken = set(chosen)
    return Selection(chosen, *([path for path in paths if path in of and path not in taken] for of in (wanted, saved)))


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


def _check_same(
    saved: Mapping[str, str], wanted: Mapping[str, str], paths: Sequence[str], where: str, *, whole: bool
) -> None:
    differ = [path for path in paths if saved.get(path) != wanted.get(path)]
    # The optimizer's arrays are like the model's: where those differ, they say nothing new.
    of_model = [path for path in differ if not path.startswith("opt_state.")]
    problems = Problems()
    for path in of_model or differ:
        if path not in saved:
            problems.add(path, f"{wanted[path]} in this run, missing in the checkpoint")
        elif path not in wanted:
            problems.add(path, f"{saved[path]} in the checkpoint, unknown to this run")
        else:
            problems.add(path, f"{saved[path]} in the checkpoint, {wanted[path]} in this run")
    other = "model" if of_model else "optimizer"
    arrays = f"{len(problems)} array{'s' * (len(problems) > 1)}"
    fix = "set another run_dir, or the config in its meta.json" if whole else "leave those that this run makes itself"
    problems.raise_any(CheckpointError, f"{where} is of another {other}, by {arrays}; {fix}:")
