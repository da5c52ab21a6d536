"""`inspect`: FLOPs with loops, memory by its place in the tree, the text and the JSON."""

from __future__ import annotations

import json
import time
from functools import lru_cache

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshpar.experiment.prepare import Prepared
from meshpar.inspection.inspect import Inspection, inspect
from meshpar.inspection.program.flops import opaque_calls, product_flops
from meshpar.inspection.program.text import Program
from meshpar.inspection.program.walk import walk
from meshpar.sharding.resolve import Placement
from tests.layouts import LAYOUTS
from tests.program.test_bytes import MODEL, ROWS, SEQ, prepared

pytestmark = pytest.mark.usefixtures("lines_of_callers")


@lru_cache
def inspected(layout: str, lowering: str = "manual", num_microbatches: int = 1) -> tuple[Prepared, Inspection]:
    run = prepared(layout, lowering, num_microbatches)
    return run, inspect(run.compile_step().compiled, run.mesh)


# FLOPs -----------------------------------------------------------------------------------------------------------


def matmul(x):
    return x @ x


def nested(x):
    def twice(x, _):
        return (lax.scan(lambda x, _: (x @ x, None), x, None, length=5)[0], None)

    return lax.scan(twice, x, None, length=3)[0]


def convolved(x):
    image = x.reshape(1, 16, 16, 1)
    kernel = jnp.ones((3, 3, 1, 4))
    return lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def batched(x):
    return jnp.einsum("bij,bjk->bik", x.reshape(4, 8, 8), x.reshape(4, 8, 8))


@pytest.mark.parametrize(
    ("function", "flops"),
    [
        (matmul, 2 * 16**3),
        (nested, 15 * 2 * 16**3),
        (convolved, 2 * 4 * (14 * 3 + 2 * 2) ** 2),  # an edge has two of three rows
        (batched, 4 * 2 * 8**3),
        (lambda x: x + 1, 0),
    ],
    ids=["dot", "nested loops", "convolution", "batched", "none"],
)
def test_products_are_counted_as_often_as_they_run(function, flops):
    assert inspect(jax.jit(function).lower(jnp.ones((16, 16))).compile()).flops == flops


def test_control_xla_counts_the_body_of_a_loop_once():
    """This is why meshpar counts itself. If it fails, `cost_analysis` has learned to count loops."""
    compiled = jax.jit(nested).lower(jnp.ones((16, 16))).compile()
    assert compiled.cost_analysis()["flops"] < 2 * 2 * 16**3


GPU = """HloModule m
ENTRY %main (p: bf16[4,8,16], w: bf16[4,32,16]) -> bf16[4,8,32] {
  %p = bf16[4,8,16]{2,1,0} parameter(0)
  %w = bf16[4,32,16]{2,1,0} parameter(1)
  %g = (bf16[4,8,32]{2,1,0}, s8[1024]{0}) custom-call(%p, %w), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],\
"rhs_contracting_dimensions":["2"],"lhs_batch_dimensions":["0"]}}}
  %k = bf16[4,8,32]{2,1,0} custom-call(%p), custom_call_target="my_kernel"
  ROOT %r = bf16[4,8,32]{2,1,0} get-tuple-element(%g), index=0
}
"""
TPU = """HloModule m
ENTRY %main (p: bf16[8,16], w: bf16[16,32]) -> bf16[8,32] {
  %p = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %w = bf16[16,32]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %c = bf16[8,32]{1,0:T(8,128)(2,1)} convolution(%p, %w), dim_labels=bf_io->bf
}
"""


def test_products_are_counted_in_the_forms_of_gpus_and_tpus():
    batched = (
        TPU.replace("bf16[8,16]", "bf16[4,8,16]")
        .replace("bf16[16,32]", "bf16[4,16,32]")
        .replace("bf16[8,32]", "bf16[4,8,32]")
    )
    batched = batched.replace("dim_labels=bf_io->bf", "window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf")
    flops_of_one = 2 * 8 * 16 * 32
    for text, flops, opaque in [
        (GPU, 4 * flops_of_one, ("my_kernel",)),
        (TPU, flops_of_one, ()),
        (batched, 4 * flops_of_one, ()),
    ]:
        program = Program(text)
        visits = list(walk(program))
        assert (product_flops(program, visits), opaque_calls(visits)) == (flops, opaque)


def decoder_flops() -> int:
    """Forward, and twice that backward: 6 for each weight and token, without the lookup; 12 b s^2 d for attention.

    The backward of attention in blocks computes the scores again: 2 b s^2 d.
    """
    d = MODEL.hidden_size
    m = MODEL.intermediate_size
    v = MODEL.vocab_size
    layer = 4 * d * d + 3 * d * m
    attention = 2 * SEQ * d
    tokens = ROWS * SEQ
    scores = SEQ * d
    return 2 * tokens * (MODEL.num_layers * (3 * (layer + attention) + scores) + 3 * v * d)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("layout", "num_microbatches"),
    [
        pytest.param(layout, num, marks=[] if (i + num) % 2 else pytest.mark.slow)
        for i, layout in enumerate(LAYOUTS)
        for num in (1, 4)
    ],
)
def test_the_flops_of_a_step_are_a_decoders_divided_among_all_devices(layout, num_microbatches):
    _, inspection = inspected(layout, "manual", num_microbatches)
    assert inspection.flops * 8 == decoder_flops()


# Memory ----------------------------------------------------------------------------------------------------------


def local_bytes(placements) -> int:
    leaves = jax.tree.leaves(placements, is_leaf=lambda x: isinstance(x, Placement))
    return sum(placement.local_bytes for placement in leaves)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_arguments_equal_the_placements_to_the_byte(layout):
    run, inspection = inspected(layout)
    held = inspection.memory.arguments
    assert held["state.params"] == local_bytes(run.placement.params)
    assert held["state.opt_state"] == local_bytes(run.placement.opt_state)
    of_compiler = run.compile_step().compiled.memory_analysis().argument_size_in_bytes
    assert sum(held.values()) == pytest.approx(of_compiler, abs=64 * len(jax.tree.leaves(run.placement.structs)))


def test_control_a_state_that_is_not_donated_is_an_output():
    """If the state is donated, only metrics are new outputs; if not, the whole state is."""
    x = jnp.ones((64, 64))
    donated, kept = (inspect(jax.jit(lambda x: x + 1, donate_argnums=n).lower(x).compile()).memory for n in ((0,), ()))
    assert (donated.outputs, kept.outputs) == (0, 64 * 64 * 4)


def test_the_largest_argument_and_temporary_are_named():
    def big(state):
        return jnp.cumsum(state["w"] @ state["w"].T, axis=0) @ state["w"] + state["b"]

    state = {"w": jnp.ones((64, 8)), "b": jnp.ones(8)}
    inspection = inspect(jax.jit(big).lower(state).compile()).largest
    argument = inspection[0]
    temporaries = [held for held in inspection if not held.is_argument]
    assert (argument.name, argument.array, argument.num_bytes) == ("state.w", "f32[64,8]", 2048)
    assert (temporaries[0].array, temporaries[0].num_bytes) == ("f32[64,64]", 64 * 64 * 4)
    assert __file__ in {held.source.rpartition(":")[0] for held in temporaries}


# Text and JSON ----------------------------------------------------------------------------------------------------


def test_the_text_of_an_inspection():
    _, inspection = inspected("zero3")
    lines = str(inspection).splitlines()
    assert lines[:3] == ["a device, in one step", "", "mesh: fsdp=8"]
    gathers = next(line for line in lines if line.startswith("  all_gather"))
    # The seven kernels of three layers, which one line multiplies with, forward and backward.
    assert gathers.split()[1:3] == ["fsdp", "42x"]
    assert "state.params.blocks." in gathers
    assert "meshpar/nn/layers.py:" in gathers


def test_the_json_has_the_numbers_of_the_inspection():
    _, inspection = inspected("data2_fsdp2_tensor2")
    plain = json.loads(json.dumps(inspection.as_json()))
    assert sum(plain["sent_bytes_per_axis"].values()) == pytest.approx(plain["sent_bytes"], abs=8)
    assert (
        sum(collective["times"] * collective["sent_bytes"] for collective in plain["collectives"])
        == plain["sent_bytes"]
    )
    assert plain["flops"] == inspection.flops


def test_without_a_mesh_the_axes_are_unknown():
    run = prepared("zero3")
    assert set(inspect(run.compile_step().compiled).bytes_per_axis) == {"unknown axes"}


def test_five_megabytes_of_text_take_less_than_two_seconds():
    run = prepared("zero3")
    text = run.compile_step().text
    program = Program(text)
    body = text[text.index("\n\n%") : text.index("\nENTRY")]
    entry = text[text.index("\nENTRY") :]
    arguments = ", ".join(
        f"%{instruction.name}"
        for instruction in program.computation(program.entry).values()
        if instruction.opcode == "parameter"
    )
    copies = []
    calls = []
    while sum(map(len, copies)) + len(text) < 5e6:  # another copy of the whole program, and a call of it
        name = f"c{len(copies)}_"
        copies.append((body + entry.replace("ENTRY ", "")).replace("%", f"%{name}"))
        calls.append(f"  %{name} = f32[] call({arguments}), to_apply=%{name}{program.entry}\n")
    first = entry.index("\n", 1) + 1
    large = text[: text.index("\nENTRY")] + "".join(copies) + entry[:first] + "".join(calls) + entry[first:]
    times = []
    for _ in range(3):  # the least of three, because other processes use the machine
        began = time.perf_counter()
        inspection = inspect(large, run.mesh)
        times.append(time.perf_counter() - began)
    assert min(times) < 2
    assert inspection.flops == (len(copies) + 1) * inspect(text).flops
