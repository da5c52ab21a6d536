"""A step with a declared reduction sends its closed form to the byte, in the order of the backward."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest

from meshpar.collectives.reduction import Bfloat16, Exact, Float8, Int8, OneBit, PowerSGD, Reduce
from meshpar.experiment.config import Precision
from meshpar.experiment.prepare import prepare
from meshpar.mesh.layout import AxisSizes, MeshLayout
from meshpar.parallel.buckets import buckets, order_of
from tests.program.oracle import closed_form
from tests.program.test_bytes import cost_as_traced, cost_as_written, prepared

REDUCTIONS = {
    "exact": Reduce(algorithm="ring"),
    "bf16": Reduce(within=Bfloat16(), across=Bfloat16()),
    "int8": Reduce(within=Bfloat16(), across=Int8(error_feedback=True), bucket_bytes="1KiB"),
    "fp8": Reduce(within=Float8(), across=Exact()),
    "onebit": Reduce(within=Int8(block=64), across=OneBit(block=64), algorithm="halving_doubling"),
    "powersgd": Reduce(across=PowerSGD(rank=2)),
}
SAMPLE = [("exact", "zero1", 4), ("int8", "data2_fsdp2_tensor2", 1), ("onebit", "zero2", 2), ("powersgd", "tensor4", 1)]
MORE = [("bf16", "hsdp2x4", 2), ("fp8", "zero3", 2), ("int8", "data8", 1), ("int8", "tensor4_sp", 2)]
CASES = [*SAMPLE, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]


def sent_and_form(run):
    assert run.traced_bytes == closed_form(run)
    sent, num_flops = cost_as_written(run)
    # XLA turns products with a one-row matrix into multiplications: four of PowerSGD's, for the last norm's scale.
    of_one_row = (
        4 * 2 * run.run.model.hidden_size if isinstance(run.run.parallel.gradient_reduction.across, PowerSGD) else 0
    )
    assert (sent, num_flops + of_one_row) == cost_as_traced(run)
    return sent, run.traced_bytes


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "layout", "num_microbatches"), CASES)
def test_a_step_with_a_declared_reduction_sends_the_closed_form(name, layout, num_microbatches):
    sent, form = sent_and_form(
        prepared(layout, num_microbatches=num_microbatches, parallel={"gradient_reduction": REDUCTIONS[name]})
    )
    assert sent == form


@pytest.mark.slow
def test_a_declared_reduction_over_slices_sends_the_closed_form():
    mesh = MeshLayout(data=2, fsdp=2, dcn=AxisSizes(replica=2))
    run = prepared("hsdp2x4", parallel={"gradient_reduction": REDUCTIONS["int8"]})
    sent, form = sent_and_form(prepare(run.run.model_copy(update={"mesh": mesh})))
    assert sent == form


def test_control_another_reduction_has_another_closed_form():
    form = closed_form(prepared("data8", parallel={"gradient_reduction": REDUCTIONS["int8"]}))
    assert form != prepared("data8", parallel={"gradient_reduction": REDUCTIONS["bf16"]}).traced_bytes


def test_int8_sends_at_most_52_percent_of_bfloat16_in_a_step_too():
    """The model has large gradients, 100 M parameters on 8 devices; nothing is compiled."""
    from meshpar.models import Llama

    model = Llama(num_layers=8, hidden_size=1024, num_heads=8, intermediate_size=4096, vocab_size=1024)

    def bytes_of(across):
        return gradients_of(prepared("data8", model=model, parallel={"gradient_reduction": Reduce(across=across)}))

    assert bytes_of(Int8()) <= Fraction(52, 100) * bytes_of(Bfloat16())
    assert bytes_of(OneBit()) < Fraction(8, 100) * bytes_of(Bfloat16())


def gradients_of(run) -> Fraction:
    return sum((run.traced_bytes or {}).values(), Fraction(0))


@pytest.mark.slow
def test_exact_sums_of_bfloat16_gradients_are_sent_in_bfloat16():
    """XLA:CPU would widen its own sums to 4 bytes."""
    precision = Precision(params="bfloat16", compute="bfloat16", gradients="bfloat16", master="float32")
    run = prepared("data8", precision=precision, parallel={"gradient_reduction": Reduce()})
    sent, form = sent_and_form(run)
    assert sent == form
    assert sum(sent.values()) < Fraction(51, 100) * sum((prepared("data8").traced_bytes or {}).values())


def test_buckets_fill_up_in_the_order_of_the_stream():
    assert [[tuple(piece) for piece in bucket] for bucket in buckets([3, 0, 5, 1], 4)] == [
        [(0, 0, 3), (2, 0, 1)], [(2, 1, 5)], [(3, 0, 1)],
    ]  # fmt: skip


def test_the_backward_makes_the_last_layers_gradient_first():
    def loss(params, x):
        for name in ("first", "middle", "last"):
            x = jnp.tanh(x @ params[name])
        return x.sum()

    params = {name: jnp.eye(3) for name in ("first", "last", "middle")}
    names = sorted(params)
    order = order_of(jax.grad(loss), params, jnp.ones((2, 3)))
    assert [names[i] for i in order] == ["last", "middle", "first"]
