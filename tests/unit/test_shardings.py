"""XLA's printed shardings are read as specs, in every form; one that does not consist of whole axes is None."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar.inspection.program.shardings import spec, spec_text, tiles

SIZES = (2, 2, 2)
NAMES = ("data", "fsdp", "tensor")
MESH = AbstractMesh(SIZES, NAMES)
SPECS = [
    P("data"),
    P(None, "fsdp"),
    P(("data", "tensor")),
    P(("tensor", "data"), "fsdp"),
    P("fsdp", None, ("data", "tensor")),
]


@pytest.mark.parametrize("pspec", SPECS, ids=str)
def test_a_sharding_that_jax_passes_to_xla_is_read_back(pspec):
    sharding = NamedSharding(jax.make_mesh(SIZES, NAMES, axis_types=(jax.sharding.AxisType.Auto,) * 3), pspec)
    printed = str(sharding._to_xla_hlo_sharding(3)).strip("{}")
    assert (
        spec(printed, MESH)
        == tuple((entry,) if isinstance(entry, str) else entry or () for entry in (*pspec, None, None))[:3]
    )


FORMS = {
    "replicated": "P()",
    "devices=[2,1,4]<=[8] last_tile_dim_replicate": "P('data')",
    "devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate": "P(None, ('fsdp', 'tensor'))",
    "devices=[2,2]0,1,2,3": None,
    "devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate": "P('data')",
    "devices=[2,2,2]<=[8] last_tile_dims={manual, replicated}": "P('data')",
    "mesh['a'=2,'b'=4], [{'b'}, {}]": "P(('fsdp', 'tensor'))",
    "mesh['a'=2,'b'=4], [{}, {'b', 'a'}]": "P(None, ('fsdp', 'tensor', 'data'))",
    "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)), [{'b'}, {'a'}]": "P('data', ('fsdp', 'tensor'))",
    "mesh['a'=2,'b'=4], [{'b':(1)2}, {}]": None,
    "devices=[8,1]7,6,5,4,3,2,1,0": None,
    "maximal device=0": None,
}  # fmt: skip


@pytest.mark.parametrize(("printed", "text"), FORMS.items())
def test_each_printed_form_of_a_sharding_is_read(printed, text):
    found = spec(printed, MESH)
    assert (None if found is None else spec_text(found)) == text


def test_a_sharding_over_part_of_the_devices_has_tiles_but_no_axes():
    printed = "devices=[1,2,2]<=[4] last_tile_dim_replicate"
    held = tiles(printed)
    assert held is not None
    assert [list(tile) for tile in held] == [[0, 0, 0, 0], [0, 0, 1, 1]]
    assert spec(printed, MESH) is None
    assert spec("devices=[8,1]<=[8]", None) is None
