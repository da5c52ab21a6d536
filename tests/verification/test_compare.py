"""The differences that a comparison of two runs disregards."""

from __future__ import annotations

import numpy as np

from meshpar.verification.compare import compare, without_gradient
from meshpar.verification.trial import StepResult


def run_of(gradients, parameters):
    """Steps of a run with a parameter `a`, whose loss, norm and other parameter `b` are ones."""
    ones = {"b": np.ones(2)}
    scalar = {"": np.ones(())}
    return [
        StepResult(scalar, ones | {"a": np.array(grad)}, scalar, ones | {"a": np.array(x)}, {})
        for grad, x in zip(gradients, parameters, strict=True)
    ]


def first_difference(got, reference):
    return compare(got, reference, without_gradient(reference)).first


def test_an_update_by_rounding_is_no_difference_although_the_rounding_is_zero_in_a_step():
    reference = run_of([[0.0, 1e-18], [2e-18, 0.0]], [[0.0, 1e-3], [1e-3, 1e-3]])
    got = run_of([[1e-18, -1e-18], [1e-18, 0.0]], [[1e-3, -1e-3], [2e-3, -1e-3]])
    assert first_difference(got, reference) is None


def test_an_update_of_a_parameter_without_a_gradient_is_a_difference():
    reference = run_of([[0.0, 1e-18], [0.0, 1e-18]], [[0.0, 0.0], [0.0, 0.0]])
    got = run_of([[0.0, 1e-18], [0.0, 1e-18]], [[1e-3, 0.0], [1e-3, 0.0]])
    assert str(first_difference(got, reference)) == "step 1, parameter of a: differs by up to 0.001, of 0"


def test_a_gradient_where_the_reference_has_rounding_is_a_difference():
    reference = run_of([[1e-18, 1e-18]], [[0.0, 0.0]])
    got = run_of([[1e-3, 1e-18]], [[0.0, 0.0]])
    assert first_difference(got, reference).kind == "gradients"
