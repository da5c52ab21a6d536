"""A chip is found by the exact kind of device that JAX states."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from meshpar.cost.traced import Collective
from meshpar.mesh.hardware import CHIPS, LINKS, Chip, Link, Links, chip_of
from meshpar.mesh.layout import MeshLayout
from meshpar.planning.machine import StatedMachine


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


@pytest.mark.parametrize("kind", ["NVIDIA GH200 480GB", "NVIDIA GB300", "TPU v4 lite", "NVIDIA H100", "cpu", ""])
def test_control_a_kind_that_holds_the_name_of_another_is_not_taken_for_it(kind: str):
    assert chip_of_kind(kind) is None


def test_no_kind_is_two_chips():
    kinds = [kind for chip in CHIPS for kind in chip.kinds]
    assert len(kinds) == len(set(kinds))


def most_over_a_link(num_hosts: int, together: int) -> Fraction:
    """The largest part of a buffer that a device sends to another host in an all-gather by NCCL's rings.

    There are as many rings as devices of the group on a host, each for an equal part of the buffer. A ring passes all
    devices of a host before it goes on to the next host, and the rings leave a host from different devices.
    """
    size = num_hosts * together
    sent: Counter[int] = Counter()
    for shift in range(together):
        ring = [host * together + (i + shift) % together for host in range(num_hosts) for i in range(together)]
        for one, after in pairwise([*ring, ring[0]]):
            if one // together != after // together:
                sent[one] += size - 1  # parts of 1/size that pass each link of a ring
    return max(sent.values()) * Fraction(1, size * together)


@pytest.mark.parametrize(("num_hosts", "together"), [(8, 8), (8, 2), (8, 1), (48, 4)])
def test_a_group_has_as_many_links_across_hosts_as_devices_on_a_host(num_hosts, together):
    """A DGX H100 has 8 adapters of 400 Gb/s, one for each GPU: 64 GPUs gather 8 times as fast as one adapter sends."""
    links = LINKS["H100 SXM"]
    assert links.across.bytes_per_s == 400e9 / 8
    without_latency = Links(Link(links.inside.bytes_per_s, 0.0), Link(links.across.bytes_per_s, 0.0))
    machine = StatedMachine("a", num_hosts * together, together, 1.0, 1.0, without_latency)
    mesh = MeshLayout(fsdp=num_hosts * together).abstract()
    gathered = 10**9
    taken = machine.collective_s(Collective("all_gather", ("fsdp",), gathered, num_hosts * together), mesh)
    over_network = float(most_over_a_link(num_hosts, together)) * gathered / links.across.bytes_per_s
    assert taken == pytest.approx(over_network)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_the_numbers_of_a_chip_are_in_base_units(chip: Chip):
    """A number in GB or TFLOPS, or one with sparsity, would leave these bounds."""
    assert 1e14 < chip.flops <= 2.5e15
    assert 15e9 < chip.memory_bytes < 200e9
    assert 100 < chip.flops / chip.memory_bytes_per_s < 600
