"""On TPUs a product runs between the start and the end of every hop, and one more chunk a direction is held.

Compiled for a v5e:2x4, which needs the extra tpu-target; nothing is run.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.collectives.matmul import all_gather_matmul, matmul_reduce_scatter
from meshpar.collectives.ring import Ring
from meshpar.experiment.config import Precision
from meshpar.experiment.prepare import prepare
from meshpar.inspection.program.hlo import collectives_of, total_sent_bytes
from meshpar.mesh import process
from meshpar.mesh.targets import parse
from meshpar.models import GPT
from tests.program.oracle import share
from tests.program.schedule import hides
from tests.program.test_bytes import SIZES, prepared

P = PartitionSpec
N = 8
ROWS = 4096
WIDTH = 8192
CHUNK_BYTES = ROWS * WIDTH * 2  # two of them do not fit in VMEM, where they would not be counted


def scheduled(*, product_first: bool) -> str:
    """A program that starts to send, multiplies and then waits, or one that waits before it multiplies."""
    product = "  %p = f32[8]{0} fusion(%x), kind=kOutput, calls=%fused\n"
    done = "  %d = f32[8]{0} collective-permute-done(%s)\n"
    return (
        "HloModule m, is_scheduled=true, num_partitions=8\n\n"
        "%fused (a: f32[8]) -> f32[8] {\n  %a = f32[8]{0} parameter(0)\n"
        "  ROOT %c = f32[8]{0} convolution(%a, %a), dim_labels=bf_io->bf\n}\n\n"
        "ENTRY %main (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n"
        "  %s = (f32[8]{0}, f32[8]{0}) collective-permute-start(%x), source_target_pairs={{0,1}}\n"
        + (product + done if product_first else done + product)
        + "  ROOT %r = f32[8]{0} add(%p, %d)\n}\n"
    )


def test_only_a_product_between_start_and_end_of_a_permute_hides_it():
    assert hides(scheduled(product_first=True)) == [True]
    assert hides(scheduled(product_first=False)) == [False]


def gathering(ring, x, w):
    return all_gather_matmul("sk,kn->sn", x, [w], ring, dim="s")[0]


def scattering(ring, x, w):
    return matmul_reduce_scatter("sk,kn->sn", x, w, ring, dim="s")


def contracting(ring, w, x):
    return all_gather_matmul("kn,sk->sn", w, [x], ring, dim="k")[0]


def plain(ring, x, w):
    return lax.all_gather(x, ring.axes, tiled=True) @ w


ROW = P("tensor")
COLUMN = P(None, "tensor")
KERNELS = {
    # (shape, spec) of each argument, and the spec of the result. The chunked dim has ROWS elements on each device.
    gathering: (((N * ROWS, WIDTH), ROW), ((WIDTH, N * 512), COLUMN), COLUMN),
    scattering: (((N * ROWS, N * 512), COLUMN), ((N * 512, WIDTH), ROW), ROW),
    contracting: (((N * ROWS, WIDTH), ROW), ((N * 512, N * ROWS), ROW), ROW),
    plain: (((N * ROWS, WIDTH), ROW), ((WIDTH, N * 512), COLUMN), COLUMN),
}


def compiled(kernel, way, unrolled=8):
    process.compile_only()
    mesh = Mesh(parse("v5e:2x4").devices(), ("tensor",))
    *arguments, result = KERNELS[kernel]
    ring = Ring(("tensor",), way == "bidirectional", unrolled)
    f = jax.shard_map(partial(kernel, ring), mesh=mesh, in_specs=tuple(spec for _, spec in arguments), out_specs=result)
    structs = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for shape, spec in arguments
    ]
    return jax.jit(f).lower(*structs).compile()


@pytest.mark.slow
@pytest.mark.parametrize("unrolled", [8, 1])
@pytest.mark.parametrize("way", ["ring", "bidirectional"])
@pytest.mark.parametrize("kernel", [gathering, scattering, contracting])
def test_every_hop_is_hidden_behind_a_product(kernel, way, unrolled):
    program = compiled(kernel, way, unrolled)
    hidden = hides(program.as_text() or "")
    if unrolled == 8:
        assert len(hidden) == N - 1
    assert all(hidden)
    # In each direction, the chunk of the product and one more.
    directions = 2 if way == "bidirectional" else 1
    assert program.memory_analysis().temp_size_in_bytes <= 2.1 * directions * CHUNK_BYTES


@pytest.mark.slow
def test_control_a_plain_gather_hides_nothing_and_holds_all_chunks():
    program = compiled(plain, "ring")
    assert [collective.kind for collective in collectives_of(program)] == ["all_gather"]
    assert not any(hides(program.as_text() or ""))
    assert program.memory_analysis().temp_size_in_bytes >= N * CHUNK_BYTES


# A step ----------------------------------------------------------------------------------------------------------

LAYERS = SIZES["num_layers"]
TOKENS = 16 * 16
STREAM = TOKENS * SIZES["hidden_size"] * 2
WEIGHTS = 8 * SIZES["hidden_size"] ** 2  # q, k, v, o; up and down are twice as wide
RING = {"overlap": "ring"}
HIDDEN = {
    # A layer sends 8 for its regions, 3 to recompute them, 2 for gradients of weights; the head 3. Plain: 11 and 2.
    "tensor4_sp": ({"tensor": RING}, (LAYERS * 13 + 3) * share(4, STREAM), (LAYERS * 2 + 1) * share(4, STREAM)),
    # 6/8 of the kernels are gathered three times, down twice, in 2 bytes; gradients have 4. Plain: twice each.
    "zero3": ({"fsdp": RING}, LAYERS * share(8, WEIGHTS // 8 * 76), LAYERS * share(8, WEIGHTS // 8 * 12)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "settings", "sent", "more"), [(name, *of) for name, of in HIDDEN.items()])
def test_the_hops_of_a_step_for_tpus_send_the_traced_bytes(layout, settings, sent, more):
    """XLA:TPU keeps barriers and merges no hops. It repeats other collectives if they are small, so only hops count."""
    process.compile_only()
    model = GPT(**SIZES, remat="full")
    runs = [prepared(layout, model=model, precision=Precision(compute="bfloat16"), **s).run for s in (settings, {})]
    overlapped, plain = (prepare(run, run.mesh.build(parse("v5e:2x4").devices())) for run in runs)
    found = collectives_of(overlapped.compile_step().compiled, overlapped.mesh)
    assert total_sent_bytes(found, "collective_permute") == sent
    forms = [sum((run.traced_bytes or {}).values()) for run in (overlapped, plain)]
    assert forms[0] - forms[1] == more
