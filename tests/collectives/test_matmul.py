"""Collective matmuls equal whole products in float64, and their compiled programs make the hops of the closed form."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import product
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from meshpar.collectives.matmul import all_gather_matmul, matmul_reduce_scatter
from meshpar.collectives.ring import Ring, gather
from meshpar.cost.traced import traced_collectives
from meshpar.errors import ShardingError
from meshpar.inspection.program.hlo import collectives_of, total_sent_bytes
from meshpar.mesh.varying import varying
from tests.comparison import largest_difference

P = PartitionSpec
WAYS = {"ring": False, "bidirectional": True}
# Sizes of a shard; the global sizes are n times these.
B = 2
S = 3
D = 2
M = 2


def mesh_of(n):
    return jax.make_mesh((n,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])


def sequence_sharded(ring, x, up, gate, down):
    """A block with sequence parallelism: x[B, S_t, D], up[D, M_t], gate[D, M_t], down[M_t, D] -> [B, S_t, D]."""
    h, g = all_gather_matmul("bsd,dm->bsm", x, [up, gate], ring, dim="s")
    return matmul_reduce_scatter("bsm,md->bsd", jnp.sin(h) * g, down, ring, dim="s")


def weights_stored(ring, x, up, gate, down):
    """The same with x[B_t, S, D], up[D_t, M], gate[D, M_t], down[M, D_t]: `up` is contracted as it arrives."""
    (h,) = all_gather_matmul("dm,bsd->bsm", up, [x], ring, dim="d")
    (g,) = all_gather_matmul("dm,bsd->bsm", gate, [x], ring, dim="m")
    return all_gather_matmul("md,bsm->bsd", down, [jnp.sin(h) * g], ring, dim="d")[0]


def whole(x, up, gate, down):
    return (jnp.sin(x @ up) * (x @ gate)) @ down


BLOCKS = {
    sequence_sharded: (P(None, "tensor"), P(None, "tensor"), P(None, "tensor"), P("tensor")),
    weights_stored: (P("tensor"), P("tensor"), P(None, "tensor"), P(None, "tensor")),
}


def arguments(n):
    shapes = [(B * n, S * n, D * n), (D * n, M * n), (D * n, M * n), (M * n, D * n)]
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


def on(mesh, block, ring):
    specs = BLOCKS[block]
    return jax.shard_map(partial(block, ring), mesh=mesh, in_specs=specs, out_specs=specs[0])


def value_and_gradients(f):
    return jax.value_and_grad(lambda *args: jnp.cos(f(*args)).sum(), argnums=(0, 1, 2, 3))


def difference(n, way, block=sequence_sharded, unrolled=8):
    """The largest difference of a result or a gradient from products of whole arrays."""
    with jax.enable_x64(True):
        args = arguments(n)
        got = jax.jit(value_and_gradients(on(mesh_of(n), block, Ring(("tensor",), WAYS[way], unrolled))))(*args)
        want = value_and_gradients(whole)(*args)
    return largest_difference(got, want)


EVERY = list(product(BLOCKS, [2, 3, 4, 8], WAYS, ["unrolled", "scanned"]))
SAMPLE = {(3, "ring", "unrolled"), (4, "bidirectional", "scanned")}
CASES = [
    pytest.param(*case, marks=[] if case[1:] in SAMPLE else pytest.mark.slow, id=f"{case[0].__name__}-{case[1:]}")
    for case in EVERY
]


@pytest.mark.parametrize(("block", "n", "way", "form"), CASES)
def test_a_collective_matmul_equals_the_product_of_whole_arrays(block, n, way, form):
    assert difference(n, way, block, unrolled=1 if form == "scanned" else 8) < 1e-10


@pytest.mark.parametrize("shift", [2, -1])
def test_control_chunks_that_go_another_way_change_the_result(shift, monkeypatch):
    """With hops of another length or direction, another device's chunk arrives.

    In a gather followed by a scatter the two errors would cancel. No other test has five devices, so that no cached
    trace hides the fault.
    """
    send = Ring.send

    def send_elsewhere(ring, chunks, lanes):
        return send(ring, chunks, [lane._replace(shift=lane.shift * shift) for lane in lanes])

    monkeypatch.setattr(Ring, "send", send_elsewhere)
    assert difference(5, "ring", weights_stored) > 1e-2


@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")])
def test_the_axes_of_a_ring_may_be_in_any_order(axes):
    """`gather` passes each chunk with its device's rank, counted along the axes in the given order."""
    mesh = jax.make_mesh((2, 3), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:6])

    def local(x):
        def visit(seen, chunk, rank):
            seen = varying(jnp.zeros(6), axes) if seen is None else seen
            return seen.at[rank].set(chunk[0])

        return gather(Ring(axes), x, visit)

    seen = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(axes), out_specs=P(axes)))(jnp.arange(6.0))
    np.testing.assert_array_equal(seen.reshape(6, 6), np.tile(np.arange(6.0), (6, 1)))


def test_a_collective_matmul_can_be_differentiated_twice():
    mesh = mesh_of(2)
    ring = Ring(("tensor",))
    with jax.enable_x64(True):
        args = arguments(2)
        got, want = (
            jax.grad(lambda *args, f=f: jnp.sin(jax.grad(lambda *args: f(*args).sum())(*args)).sum(), argnums=1)(*args)
            for f in (jax.jit(on(mesh, sequence_sharded, ring)), whole)
        )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


# Communication --------------------------------------------------------------------------------------------------


def traced(n, way, unrolled=8, gradients=False):
    block = on(mesh_of(n), sequence_sharded, Ring(("tensor",), WAYS[way], unrolled))
    return jax.jit(value_and_gradients(block) if gradients else block).trace(*arguments(n))


def compiled(n, way, unrolled=8, gradients=False):
    return collectives_of(traced(n, way, unrolled, gradients).lower().compile(), mesh_of(n))


def hops(found):
    """Distance of a permute's hop round the ring -> how often it is made."""
    permutes = [permute for permute in found if permute.kind == "collective_permute"]
    shifts = [
        ((permute.groups[0][1] - permute.groups[0][0]) % len(permute.groups), permute.times) for permute in permutes
    ]
    return sum((Counter({shift: times}) for shift, times in shifts), Counter())


@pytest.mark.parametrize(("n", "way", "unrolled"), [(3, "bidirectional", 8), (4, "ring", 1), (4, "bidirectional", 8)])
def test_rounds_and_bytes_of_the_compiled_program_equal_the_closed_form(n, way, unrolled):
    """The gather and the scatter send n-1 chunks each, in n-1 rounds one way or n // 2 both ways, and nothing else."""
    found = compiled(n, way, unrolled)
    chunk = B * n * S * D * n * 4
    assert {collective.kind for collective in found} == {"collective_permute"}
    assert total_sent_bytes(found) == 2 * (n - 1) * chunk
    forth, back = (n - 1, 0) if way == "ring" else (n // 2, ceil(n / 2) - 1)
    assert hops(found) == Counter({1: 2 * forth, n - 1: 2 * back}) - Counter()


@pytest.mark.parametrize(("unrolled", "merged"), [(1, 1), (8, 7)])
def test_the_backward_sends_the_transposes_and_the_gathered_operand_once_more(unrolled, merged):
    """Two rings forward; backward the gradients of both, and the gather of x again.

    JAX 0.10's CPU compiler drops barriers and then merges the equal hops of x: all hops of unrolled rings, and the
    first hop of rings that are loops. JAX 0.12's compiler merges none.
    """
    program = traced(8, "ring", unrolled, gradients=True)
    assert sum(collective.times for collective in traced_collectives(program.jaxpr)) == 5 * 7
    sent = hops(collectives_of(program.lower().compile(), mesh_of(8)))
    assert sent in ({1: 5 * 7}, {1: 5 * 7 - merged})


def test_a_group_of_one_compiles_to_no_communication():
    assert compiled(1, "bidirectional", gradients=True) == []


def test_the_product_has_the_activations_dtype_and_the_gradient_that_of_the_weights():
    mesh = mesh_of(2)
    ring = Ring(("tensor",))

    def local(w, x):
        y, transpose = jax.vjp(lambda w: all_gather_matmul("dm,sd->sm", w, [x], ring, dim="d")[0], w)
        return y, *transpose(y)

    spec = P("tensor")
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec)))
    y, gradient = step(jnp.ones((4, 2), jnp.float32), jnp.ones((2, 4), jnp.bfloat16))
    assert (y.dtype, gradient.dtype) == (jnp.bfloat16, jnp.float32)


# Errors ---------------------------------------------------------------------------------------------------------

RING = Ring(("tensor",))
REFUSED = {
    "a ring over data: not manual here; use it in a jax.shard_map over it": lambda x: all_gather_matmul(
        "sd,dm->sm", x, [x.T], Ring(("data",)), dim="s"
    ),
    "a collective matmul over tensor: dim s = 3 is not divisible by 2, the devices of the ring": lambda x: (
        matmul_reduce_scatter("sd,dm->sm", x, x.T, RING, dim="s")
    ),
    "a collective matmul over tensor: dim d is 8 in the gathered operand, but 4 in the other": lambda x: (
        all_gather_matmul("sd,dm->sm", x, [x.T], RING, dim="d")
    ),
}


@pytest.mark.parametrize(("message", "use"), REFUSED.items(), ids=["not manual", "indivisible", "another size"])
def test_an_operand_that_does_not_fit_the_ring_is_an_error(message, use):
    def local(x):
        use(x)
        return x

    with pytest.raises(ShardingError) as error:
        jax.shard_map(local, mesh=mesh_of(2), in_specs=P("tensor"), out_specs=P("tensor"))(jnp.ones((6, 4)))
    assert str(error.value) == message
