"""Narrow kernels that multiply the same value are one product on CPUs."""

from __future__ import annotations

import jax
import pytest

from meshpar.partition import joint
from tests.equivalence.conftest import on_one_device, outcome, prepared


def num_products(layout):
    run = prepared("llama", layout, "manual", 1)
    return str(jax.make_jaxpr(run.step)(run.placement.structs, run.batch)).count("dot_general")


@pytest.mark.parametrize(("layout", "is_joint"), [("tensor4_sp", True), ("zero3", False)])
def test_kernels_are_one_product_if_together_they_are_narrower_than_their_input(layout, is_joint, monkeypatch):
    """Over four devices q, k and v are together 12 wide, and x is 16."""
    found = num_products(layout)
    monkeypatch.setattr(joint, "_are_narrow", lambda program, steps: False)
    assert (num_products(layout) > found) == is_joint


def test_control_a_joint_product_in_another_order_is_seen(monkeypatch):
    product = joint.matmul
    monkeypatch.setattr(joint, "matmul", lambda x, *kernels: product(x, *kernels[::-1]))
    assert outcome(prepared("llama", "tensor4_sp", "manual", 1)).difference(on_one_device("llama")) > 1e-4
