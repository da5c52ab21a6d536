"""Where two runs of the same steps differ first, by how much, and by what factor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshpar.proof.trial import KINDS, Arrays, Taken

TOLERANCE = 1e-10
"""A right layout differs in the last bits, by 1e-14 or so; a wrong one by 1e-1 or so."""
NOISE = 1e-13
"""A gradient below this part of the largest one is what rounding left of a zero."""


@dataclass(frozen=True)
class Difference:
    """What differs first.

    Args:
      step: from 1.
      kind: loss, gradients, norm, parameters or carried.
      path: of the first array of this kind that differs; the others of `num_arrays` come after it in the tree.
      how: `exactly 2x`, `zero`, `the same numbers in other places`, or by how much.
    """

    step: int
    kind: str
    path: str
    how: str
    num_differing: int
    num_arrays: int

    def __str__(self) -> str:
        if self.kind in ("loss", "norm"):
            what = "the loss" if self.kind == "loss" else "the norm of the gradient"
            return f"step {self.step}, {what}: {self.how}"
        one = {"gradients": "gradient of", "parameters": "parameter of", "carried": "carried"}[self.kind]
        more = f" (and {self.num_differing - 1} of {self.num_arrays} {self.kind} beside it)" * (self.num_differing > 1)
        return f"step {self.step}, {one} {self.path}: {self.how}{more}"


@dataclass(frozen=True)
class Comparison:
    """One run against another.

    Args:
      largest: kind -> the largest difference, over the largest number of that kind.
      first: None if nothing differs by more than the tolerance.
    """

    largest: dict[str, float]
    first: Difference | None


def compare(got: Sequence[Taken], reference: Sequence[Taken], undecided: Arrays, first_step: int = 1) -> Comparison:
    """Compares runs step by step.

    Args:
      undecided: path -> bool array: elements whose parameters are not compared, see `without_gradient`.
      first_step: the number of the first of these steps.
    """
    largest = {kind: 0.0 for kind in KINDS if getattr(reference[0], kind)}
    differences = []
    for step, (mine, its) in enumerate(zip(got, reference, strict=True), start=first_step):
        for kind in (kind for kind in KINDS if getattr(its, kind)):
            errors = _errors(getattr(mine, kind), getattr(its, kind), undecided if kind == "parameters" else {})
            largest[kind] = max(largest[kind], *errors.values())
            if wrong := [path for path, error in errors.items() if not error <= TOLERANCE]:
                how = _how(getattr(mine, kind)[wrong[0]], getattr(its, kind)[wrong[0]])
                differences.append(Difference(step, kind, wrong[0], how, len(wrong), len(errors)))
    return Comparison(largest, next(iter(differences), None))


def without_gradient(reference: Sequence[Taken]) -> Arrays:
    """path -> which elements have a gradient that is zero but for rounding.

    An optimizer that divides by the gradient's size (Lion, Adafactor) makes a whole update of that rounding: no two
    layouts agree on it, and none needs to, for the loss does not depend on such a parameter.
    """
    grads = reference[0].gradients
    noise = NOISE * max(np.abs(grad).max() for grad in grads.values())
    return {path: (grad != 0) & (np.abs(grad) <= noise) for path, grad in grads.items()}


def _errors(mine: Arrays, its: Arrays, undecided: Arrays) -> dict[str, float]:
    scale = max(np.abs(array).max() for array in its.values()) or 1.0
    return {path: _largest(mine[path] - its[path], undecided.get(path)) / scale for path in its}


def _largest(difference: np.ndarray, undecided: np.ndarray | None) -> float:
    kept = difference if undecided is None else np.where(undecided, 0, difference)
    return float(np.nan_to_num(np.abs(kept), nan=np.inf).max())


def _how(got: np.ndarray, reference: np.ndarray) -> str:
    """In the words that tell a fault: a missing sum is a factor, a wrong transpose an order."""
    said = next(_explanations(got, reference), None)
    difference, scale = np.abs(got - reference).max(), np.abs(reference).max()
    return said or f"differs by up to {difference:.2g}, of {scale:.2g}"


def _explanations(got: np.ndarray, reference: np.ndarray) -> Iterator[str]:
    if not np.isfinite(got).all():
        yield "is not finite"
    if not got.any():
        yield "is zero"
    if (factor := _factor(got, reference)) is not None:
        yield f"exactly {factor}" if factor.endswith("x") else factor
    if got.size > 1 and np.allclose(np.sort(got, axis=None), np.sort(reference, axis=None), rtol=1e-9, atol=0):
        yield "the same numbers in other places"


def _factor(got: np.ndarray, reference: np.ndarray) -> str | None:
    """The factor between two arrays, if it is one for all elements: `2x`, `1/4x`, or `1.37 times as large`."""
    counted = np.abs(reference) > 1e-6 * np.abs(reference).max()
    ratios = got[counted] / reference[counted]
    if not ratios.size or np.ptp(ratios) > 1e-8 * np.abs(ratios).max():
        return None
    factor = float(np.median(ratios))
    for number, text in ((factor, "{}x"), (1 / factor, "1/{}x")):
        if abs(number - round(number)) < 1e-8 and round(number) not in (0, 1):
            return text.format(round(number))
    return f"{factor:.6g} times as large"
