"""Mesh layouts: their axes, their sizes, and the devices that they need."""

from __future__ import annotations

import re

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar.errors import MeshError
from meshpar.mesh.layout import AXES, AxisSizes, MeshLayout


def test_a_mesh_has_all_seven_axes_in_order():
    mesh = MeshLayout(data=2, fsdp=2, tensor=2).build()
    assert mesh.axis_names == AXES
    assert mesh.axis_sizes == (1, 2, 2, 1, 1, 1, 2)


def test_the_last_axis_holds_neighbours():
    mesh = MeshLayout(data=4, tensor=2).build()
    assert [d.id for d in mesh.devices.reshape(4, 2)[0]] == [0, 1]


@given(st.permutations([2, 2, 2, 1, 1, 1, 1]), st.integers(0, 6))
def test_minus_one_takes_the_remaining_devices(sizes, free):
    given_sizes = dict(zip(AXES, sizes, strict=True))
    layout = MeshLayout(**given_sizes | {AXES[free]: -1})
    assert layout.resolved(8) == given_sizes


def test_an_abstract_mesh_needs_no_devices():
    mesh = MeshLayout(data=64, tensor=8).abstract()
    assert mesh.size == 512 > jax.device_count()


def test_sizes_across_slices_multiply():
    layout = MeshLayout(fsdp=4, dcn=AxisSizes(replica=2))
    assert layout.build().shape["replica"] == 2
    assert layout.abstract().size == 8


@pytest.mark.parametrize(
    "sizes",
    [{"data": -1, "tensor": -1}, {"data": 0}, {"dcn": AxisSizes(data=-1)}, {"data": 4}, {"data": 16}, {"data": 3}],
)
def test_a_mesh_that_does_not_fit_the_devices_is_refused(sizes):
    with pytest.raises(MeshError):
        MeshLayout(**sizes).resolved(8)


@pytest.mark.parametrize(
    ("sizes", "proposals"),
    [
        ({"data": 4, "dcn": {"replica": 4}}, ["data=2", "dcn.replica=2"]),
        ({"dcn": {"data": 4}}, ["dcn.data=8"]),
        ({"data": -1, "dcn": {"data": 3}}, ["dcn.data=1, 2, 4 or 8"]),
    ],
)
def test_proposed_sizes_inside_and_across_slices_fit_the_devices(sizes, proposals):
    with pytest.raises(MeshError) as refused:
        MeshLayout(**sizes).resolved(8)
    assert re.findall(r"    (\S.*) would fit", str(refused.value)) == proposals
