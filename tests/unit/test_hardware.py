"""A chip is found by the exact kind of device that JAX states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from meshpar.mesh.hardware import CHIPS, Chip, chip_of


def chip_of_kind(kind: str) -> Chip | None:
    device: Any = SimpleNamespace(device_kind=kind)
    return chip_of(device)


def test_a_cpu_is_no_chip_so_that_no_utilization_is_claimed():
    assert chip_of(jax.devices()[0]) is None


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "TPU v4"),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
        ("TPU7x", "TPU7x"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA B200", "B200"),
    ],
)
def test_a_known_kind_of_device_names_its_chip(kind: str, name: str):
    chip = chip_of_kind(kind)
    assert chip is not None and chip.name == name


@pytest.mark.parametrize("kind", ["NVIDIA GH200 480GB", "NVIDIA GB200", "TPU v4 lite", "NVIDIA H100", "cpu", ""])
def test_control_a_kind_that_holds_the_name_of_another_is_not_taken_for_it(kind: str):
    assert chip_of_kind(kind) is None


def test_no_kind_is_two_chips():
    kinds = [kind for chip in CHIPS for kind in chip.kinds]
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_the_numbers_of_a_chip_are_in_base_units(chip: Chip):
    """A number in GB or TFLOPS, or one with sparsity, would leave these bounds."""
    assert 1e14 < chip.flops < 2.5e15
    assert 15e9 < chip.memory_bytes < 200e9
    assert 100 < chip.flops / chip.memory_bytes_per_s < 600
