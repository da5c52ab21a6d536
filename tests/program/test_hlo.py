"""The reader of compiled programs, on programs whose communication is known by hand."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from meshpar.errors import ProgramError
from meshpar.inspection.program.groups import are_parts, spanned_axes
from meshpar.inspection.program.hlo import collectives_of, total_sent_bytes
from meshpar.inspection.program.text import ArrayType

AXES = ("replica", "data", "fsdp", "pipe", "expert", "context", "tensor")
SIZES = (1, 2, 2, 1, 1, 1, 2)


@lru_cache
def make_mesh() -> Mesh:
    return jax.make_mesh(SIZES, AXES, axis_types=(AxisType.Auto,) * 7)


def compiled(function, in_specs, out_specs, shape, dtype=jnp.float32, mesh: Mesh | None = None) -> Compiled:
    mesh = mesh or make_mesh()
    local = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)
    return jax.jit(local).lower(jax.ShapeDtypeStruct(shape, dtype)).compile()


def compiled_text(*program) -> str:
    return compiled(*program).as_text() or ""


# Programs of one collective: (function, in, out, global shape) and, by hand, (kind, axes, S, n, bytes sent) -----

F32 = 4
SWAP = [(0, 1), (1, 0)]
ONE = {
    "psum": (
        lambda x: lax.psum(x, "data"), P("data"), P(), (8, 4),
        ("all_reduce", ("data",), 16 * F32, 2, 16 * F32),
    ),
    "psum_two_axes": (
        lambda x: lax.psum(x, ("data", "tensor")), P(("data", "tensor")), P(), (8, 4),
        ("all_reduce", ("data", "tensor"), 8 * F32, 4, 12 * F32),
    ),
    "psum_all_axes": (
        lambda x: lax.psum(x, AXES), P(AXES), P(), (8, 4),
        ("all_reduce", ("data", "fsdp", "tensor"), 4 * F32, 8, 7 * F32),
    ),
    "all_gather": (
        lambda x: lax.all_gather(x, "fsdp", tiled=True), P("fsdp"), P("fsdp"), (8, 4),
        ("all_gather", ("fsdp",), 32 * F32, 2, 16 * F32),
    ),
    "all_gather_two_axes": (
        lambda x: lax.all_gather(x, ("fsdp", "data"), tiled=True), P(("fsdp", "data")), P(("fsdp", "data")), (8, 4),
        ("all_gather", ("data", "fsdp"), 32 * F32, 4, 24 * F32),
    ),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x, "tensor", tiled=True), P("tensor"), P("tensor"), (8, 4),
        ("reduce_scatter", ("tensor",), 16 * F32, 2, 8 * F32),
    ),
    "psum_scatter_two_axes": (
        lambda x: lax.psum_scatter(x, ("fsdp", "tensor"), tiled=True), P(("fsdp", "tensor")), P(("fsdp", "tensor")),
        (16, 4), ("reduce_scatter", ("fsdp", "tensor"), 16 * F32, 4, 12 * F32),
    ),
    "all_to_all": (
        lambda x: lax.all_to_all(x, "tensor", 0, 1, tiled=True), P("tensor"), P("tensor"), (8, 4),
        ("all_to_all", ("tensor",), 16 * F32, 2, 8 * F32),
    ),
    "all_to_all_two_axes": (
        lambda x: lax.all_to_all(x, ("data", "tensor"), 0, 1, tiled=True), P(("data", "tensor")),
        P(("data", "tensor")), (16, 4), ("all_to_all", ("data", "tensor"), 16 * F32, 4, 12 * F32),
    ),
    "ppermute": (
        lambda x: lax.ppermute(x, "fsdp", SWAP), P("fsdp"), P("fsdp"), (8, 4),
        ("collective_permute", ("fsdp",), 16 * F32, 2, 16 * F32),
    ),
    "ppermute_two_axes": (
        lambda x: lax.ppermute(x, ("data", "fsdp"), [(i, (i + 1) % 4) for i in range(4)]), P(("data", "fsdp")),
        P(("data", "fsdp")), (8, 4), ("collective_permute", ("data", "fsdp"), 8 * F32, 2, 8 * F32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE)
def test_a_single_collective_is_counted(name):
    *program, expected = ONE[name]
    [collective] = collectives_of(compiled(*program), make_mesh())
    assert (
        collective.kind,
        collective.axes,
        collective.full_bytes,
        collective.group_size,
        collective.sent_bytes,
    ) == expected
    assert collective.times == 1
    assert collective.branches == ()


def test_an_axis_of_size_one_sends_nothing():
    found = collectives_of(compiled(lambda x: lax.psum(x, "pipe"), P("pipe"), P(), (8, 4)), make_mesh())
    assert total_sent_bytes(found) == 0


def test_a_collective_is_reported_with_its_source_line():
    [collective] = collectives_of(compiled(*ONE["all_gather"][:-1]))
    assert collective.op_name.endswith("/shard_map/all_gather")
    file, _, line = collective.source.rpartition(":")
    assert file == __file__
    assert "lax.all_gather(x, " in Path(file).read_text().splitlines()[int(line) - 1]
    assert collective.axes is None


def test_bytes_follow_the_dtype():
    [collective] = collectives_of(compiled(*ONE["all_gather"][:-1], dtype=jnp.int8))
    assert collective.arrays == (ArrayType("s8", (8, 4)),)
    assert collective.full_bytes == 32


def test_collectives_that_xla_combined_count_together():
    both = compiled(lambda x: lax.psum((x, x[:1] * 2), "data"), P("data"), (P(), P()), (8, 4))
    assert sum(c.full_bytes for c in collectives_of(both)) == (16 + 4) * F32


# Loops, branches, gradients ------------------------------------------------------------------------------------


def shift(x):
    return lax.ppermute(x, "fsdp", SWAP)


def repeat(function, length):
    return lambda x: lax.scan(lambda carry, _: (function(carry), None), x, None, length=length)[0]


def test_a_scan_multiplies():
    [collective] = collectives_of(compiled(repeat(shift, 5), P("fsdp"), P("fsdp"), (8, 4)), make_mesh())
    assert (collective.times, collective.sent_bytes) == (5, 64)
    assert total_sent_bytes([collective]) == 5 * 64


def test_nested_scans_multiply_by_both():
    def both(x):
        return jnp.sin(shift(repeat(lambda y: jnp.cos(shift(y)), 4)(x)))

    found = collectives_of(compiled(repeat(both, 3), P("fsdp"), P("fsdp"), (8, 4)), make_mesh())
    assert sorted(c.times for c in found) == [3, 12]
    assert total_sent_bytes(found) == 15 * 64


def test_collectives_of_different_branches_are_distinguished():
    def choose(x):
        even = lax.axis_index("data") == 0
        return lax.cond(
            even, lambda y: lax.psum(lax.psum(y, "fsdp") * 2, "tensor"), lambda y: lax.psum(y, ("fsdp", "tensor")), x
        )

    found = collectives_of(compiled(choose, P(("fsdp", "tensor")), P("data"), (8, 4)), make_mesh())
    by_branch = {}
    for collective in found:
        by_branch.setdefault(collective.branches, []).append(collective.axes)
    assert sorted(by_branch.values(), key=len) == [[("fsdp", "tensor")], [("fsdp",), ("tensor",)]]
    assert all(len(branches) == 1 for branches in by_branch)


def test_the_transpose_of_a_gather_is_a_scatter():
    """d/dw of sum(tanh(gather(w))), where the data differ by fsdp: w[8/2, 4] gathered, its gradient scattered."""

    def gradient(w):
        far = lax.axis_index("fsdp").astype(jnp.float32)
        return jax.grad(lambda w: jnp.sum(jnp.tanh(lax.all_gather(w, "fsdp", tiled=True) * far)))(w)

    found = collectives_of(compiled(gradient, P("fsdp"), P("fsdp"), (8, 4)), make_mesh())
    assert [(c.kind, c.axes, c.full_bytes) for c in found] == [
        ("all_gather", ("fsdp",), 128),
        ("reduce_scatter", ("fsdp",), 128),
    ]
    assert total_sent_bytes(found) == 64 + 64


def test_the_gradient_of_a_replicated_weight_is_summed_over_what_varies():
    def gradient(w):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(w * lax.axis_index("data").astype(jnp.float32))))(w)

    [collective] = collectives_of(compiled(gradient, P(), P(), (8, 4)), make_mesh())
    assert (collective.kind, collective.axes, total_sent_bytes([collective])) == ("all_reduce", ("data",), 128)


def test_totals_can_be_restricted_to_kinds_and_axes():
    def two(x):
        return lax.psum(lax.all_gather(x, "fsdp", tiled=True), "data")

    found = collectives_of(compiled(two, P(("data", "fsdp")), P("fsdp"), (8, 4)), make_mesh())
    assert total_sent_bytes(found) == 32 + 64
    assert total_sent_bytes(found, kind="all_gather") == 32
    assert total_sent_bytes(found, axes=["data"]) == 64
    assert total_sent_bytes(found, axes=["data", "fsdp"]) == 0
    assert isinstance(total_sent_bytes(found), Fraction)


# Axes ----------------------------------------------------------------------------------------------------------


def test_axes_follow_the_place_in_the_mesh_and_not_the_id_of_a_device():
    shuffled = Mesh(np.array(jax.devices())[[3, 6, 0, 5, 1, 7, 2, 4]].reshape(SIZES), AXES)
    [collective] = collectives_of(compiled(*ONE["psum"][:-1], mesh=shuffled), shuffled)
    assert collective.axes == ("data",)


def test_control_another_mesh_gives_other_axes():
    """Axes are read from the groups, so a wrong mesh gives wrong axes."""
    text = compiled_text(*ONE["psum"][:-1])
    swapped = Mesh(make_mesh().devices, ("replica", "tensor", "fsdp", "pipe", "expert", "context", "data"))
    assert collectives_of(text, swapped)[0].axes == ("tensor",)
    with pytest.raises(ProgramError, match="for 8 devices, the mesh has 4"):
        collectives_of(text, Mesh(np.array(jax.devices()[:4]), ("data",)))


def test_groups_inside_an_axis_are_parts_of_it():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    parts = ((0, 1, 2, 3), (4, 5, 6, 7))
    whole = (tuple(range(8)),)
    nothing = tuple((i,) for i in range(8))
    assert [spanned_axes(groups, mesh) for groups in (parts, whole, nothing)] == [("data",), ("data",), ()]
    assert [are_parts(groups, mesh) for groups in (parts, whole, nothing)] == [True, False, False]
