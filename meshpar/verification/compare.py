"""Compares the steps of two runs: finds the first difference, its size, and its factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshpar.verification.trial import KINDS, Arrays, StepResult

TOLERANCE = 1e-10
"""A correct layout differs by about 1e-14, from rounding; a wrong one by about 1e-1."""
NOISE = 1e-13
"""A gradient smaller than this fraction of the largest counts as zero with rounding."""


@dataclass(frozen=True)
class Difference:
    """The first difference.

    Args:
      step: counted from 1.
      kind: loss, gradients, norm, parameters or carried.
      path: path of the first array of this kind that differs.
      how: `exactly 2x`, `is zero`, `the same numbers in other places`, or the size of the difference.
      num_differing: number of arrays of this kind that differ, out of `num_arrays`.
    """

    step: int
    kind: str
    path: str
    how: str
    num_differing: int
    num_arrays: int

    def __str__(self) -> str:
        if self.kind == "loss":
            return f"step {self.step}, the loss: {self.how}"
        if self.kind == "norm":
            return f"step {self.step}, the norm of the gradient: {self.how}"
        noun = {"gradients": "gradient of", "parameters": "parameter of", "carried": "carried"}[self.kind]
        text = f"step {self.step}, {noun} {self.path}: {self.how}"
        more = self.num_differing - 1
        return f"{text} (and {more} more of {self.num_arrays} {self.kind})" if more else text


@dataclass(frozen=True)
class Comparison:
    """The comparison of two runs.

    Args:
      largest: kind -> the largest difference, relative to the largest number of that kind.
      first: None if nothing differs by more than the tolerance.
    """

    largest: dict[str, float]
    first: Difference | None


def compare(
    got: Sequence[StepResult], reference: Sequence[StepResult], undecided: Arrays, first_step: int = 1
) -> Comparison:
    """Compares runs step by step.

    Args:
      undecided: path -> bool array, True for elements of parameters that are not compared, see `without_gradient`.
      first_step: the number of the first step.
    """
    largest = {kind: 0.0 for kind in KINDS if getattr(reference[0], kind)}
    first = None
    for step, results in enumerate(zip(got, reference, strict=True), start=first_step):
        for kind in largest:
            found, expected = (getattr(result, kind) for result in results)
            errors = _errors(found, expected, undecided if kind == "parameters" else {})
            largest[kind] = max(largest[kind], *errors.values())
            wrong = [path for path, error in errors.items() if not error <= TOLERANCE]
            if wrong and first is None:
                how = _describe(found[wrong[0]], expected[wrong[0]])
                first = Difference(step, kind, wrong[0], how, len(wrong), len(errors))
    return Comparison(largest, first)


def without_gradient(reference: Sequence[StepResult]) -> Arrays:
    """path -> bool array, True for elements whose gradient is zero except for rounding, in any of the steps.

    An optimizer that divides by the size of the gradient (Lion, Adafactor) turns that rounding into a full update.
    Layouts differ in it, which is no fault: the loss does not depend on these elements. One step is not enough to find
    them, because rounding can give exactly zero in one step and not in the next.
    """
    steps = [_rounding(result.gradients) for result in reference]
    return {path: np.any([step[path] for step in steps], axis=0) for path in steps[0]}


def _rounding(grads: Arrays) -> Arrays:
    """path -> bool array, True for elements that are not zero, but too small to be more than rounding."""
    noise = NOISE * max(np.abs(grad).max() for grad in grads.values())
    return {path: (grad != 0) & (np.abs(grad) <= noise) for path, grad in grads.items()}


def _errors(got: Arrays, reference: Arrays, undecided: Arrays) -> dict[str, float]:
    """path -> the largest difference, relative to the largest number of all arrays."""
    scale = max(np.abs(array).max() for array in reference.values()) or 1.0
    errors = {}
    for path, expected in reference.items():
        difference = np.where(undecided.get(path, False), 0, np.abs(got[path] - expected))
        errors[path] = float(np.nan_to_num(difference, nan=np.inf).max() / scale)
    return errors


def _describe(got: np.ndarray, reference: np.ndarray) -> str:
    """Describes a difference so that it hints at the fault: a missing sum is a factor, a wrong transpose an order."""
    if not np.isfinite(got).all():
        return "is not finite"
    if not got.any():
        return "is zero"
    if (factor := _factor(got, reference)) is not None:
        return f"exactly {factor}" if factor.endswith("x") else factor
    if got.size > 1 and np.allclose(np.sort(got, axis=None), np.sort(reference, axis=None), rtol=1e-9, atol=0):
        return "the same numbers in other places"
    return f"differs by up to {np.abs(got - reference).max():.2g}, of {np.abs(reference).max():.2g}"


def _factor(got: np.ndarray, reference: np.ndarray) -> str | None:
    """The factor between two arrays if it is the same for all elements: `2x`, `1/4x`, or `1.37 times as large`."""
    counted = np.abs(reference) > 1e-6 * np.abs(reference).max()
    ratios = got[counted] / reference[counted]
    if not ratios.size or np.ptp(ratios) > 1e-8 * np.abs(ratios).max():
        return None
    factor = float(np.median(ratios))
    for number, text in ((factor, "{}x"), (1 / factor, "1/{}x")):
        if abs(number - round(number)) < 1e-8 and round(number) not in (0, 1):
            return text.format(round(number))
    return f"{factor:.6g} times as large"
