"""A declared reduction of gradients: its config, and its part of the train state."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from meshpar import ConfigError, VerificationError, verify
from meshpar.checkpoint.checkpoints import checkpoints
from meshpar.collectives.reduction import Int8, OneBit, PowerSGD, Reduce
from meshpar.experiment.config import Precision, load
from meshpar.experiment.prepare import prepare
from meshpar.optim import AdamW
from meshpar.optim.muon import Muon
from meshpar.train.step import with_rows
from meshpar.verification.trial import QUICK
from tests.equivalence.conftest import batches
from tests.program.test_bytes import prepared

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def test_a_config_declares_how_gradients_are_reduced():
    keys = "{within: bf16, across: {kind: int8, error_feedback: true}, algorithm: ring, bucket_bytes: 1MiB}"
    reduce = load(QUICKSTART, [f"parallel.gradient_reduction={keys}"]).parallel.gradient_reduction
    assert reduce and (reduce.within.kind, reduce.across.kind, reduce.algorithm) == ("bf16", "int8", "ring")
    assert reduce.bucket_size(4) == 1 << 18
    assert load(QUICKSTART).parallel.gradient_reduction is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("parallel.gradient_reduction.across=int9", "no kind is called 'int9'"),
        ("parallel.gradient_reduction={within: {kind: int8, error_feedback: true}}", "within has no error feedback"),
        ("parallel.gradient_reduction={within: {kind: int8, rounding: stochastic}}", "within rounds to nearest"),
        ("parallel.gradient_reduction.bucket_bytes=0", "a bucket holds at least one byte"),
        ("parallel.gradient_reduction.bucket_bytes=many", "'many' is not a number of bytes"),
        ("parallel.gradient_reduction.algorithm=rong", "expected 'ring'"),
        ("parallel.gradient_reduction={across: {kind: int8, block: 100}}", "block"),
    ],
)
def test_a_wrong_declaration_of_a_reduction_is_refused(override, words):
    with pytest.raises(ConfigError, match=words):
        load(QUICKSTART, [override])


def test_a_declared_reduction_is_refused_under_gspmd():
    with pytest.raises(ConfigError, match="under lowering: auto, XLA reduces gradients as it chooses"):
        prepared("data8", "auto", parallel={"gradient_reduction": Reduce()})


def test_an_algorithm_that_cannot_scatter_is_refused():
    with pytest.raises(ConfigError, match="algorithm tree has no plan for reduce_scatter; use one of ring"):
        prepared("zero3", parallel={"gradient_reduction": Reduce(algorithm="tree")}).compile_step()


def test_verify_refuses_a_reduction_that_rounds():
    run = prepared("data8", parallel={"gradient_reduction": Reduce(across=Int8())}).run
    with pytest.raises(VerificationError, match="gradient_reduction rounds gradients"):
        verify(run)


@pytest.mark.parametrize(
    ("layout", "across"),
    [
        pytest.param("data2_fsdp2_tensor2", Int8(error_feedback=True), id="int8"),
        pytest.param("tensor4", PowerSGD(rank=2), id="powersgd", marks=pytest.mark.slow),
    ],
)
def test_error_feedback_is_sharded_and_checkpointed(layout, across, tmp_path):
    run = prepared(layout, parallel={"gradient_reduction": Reduce(across=across)})
    step = run.compile_step(QUICK)

    def put(batch):
        return {name: jax.device_put(x, step.batch[name].sharding) for name, x in batch.items()}

    first, second, _ = map(put, batches())
    state, _ = step(run.compile_init(QUICK)(), first)
    feedback = state.carried["reduce"]
    lost = feedback["lost"]["blocks"]["mlp"]["up"]["kernel"]
    placed = run.placement.carried["reduce"]["lost"]
    assert lost.shape == (2, *run.specs["blocks"]["mlp"]["up"]["kernel"].shape)
    assert lost.sharding.spec == placed["blocks"]["mlp"]["up"]["kernel"].pspec
    assert np.asarray(lost).any()
    with checkpoints(tmp_path) as saved:
        saved.save(1, state)
        saved.wait()
        restored = saved.restore(run.placement.structs)
    after = step(state, second)[0]
    again = step(restored, second)[0]
    jax.tree.map(np.testing.assert_array_equal, after, again)


ACROSS = {
    "int8": Int8(error_feedback=True, rounding="stochastic"),
    "onebit": OneBit(),
    "powersgd": PowerSGD(rank=2),
    "powersgd without feedback": PowerSGD(rank=2, error_feedback=False),
}
PRECISIONS = {
    "float64": Precision(params="float64", compute="float64"),
    "bfloat16": Precision(compute="bfloat16", gradients="bfloat16"),
    "bfloat16 in float64": Precision(params="float64", compute="bfloat16", gradients="bfloat16"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("optim", [AdamW(lr=1e-2), pytest.param(Muon(lr=1e-2), marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", ["data2_fsdp2_tensor2", pytest.param("data8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS.keys())
@pytest.mark.parametrize("across", [
    pytest.param(across, id=name, marks=[] if name in ("int8", "powersgd") else pytest.mark.slow)
    for name, across in ACROSS.items()
])  # fmt: skip
def test_a_step_keeps_the_shapes_and_dtypes_of_the_state(across, precision, layout, optim):
    """Otherwise the compiled step would refuse its own result."""
    with jax.enable_x64(True):
        run = prepared(layout, parallel={"gradient_reduction": Reduce(across=across)}).run
        run = prepare(run.model_copy(update={"precision": precision, "optim": optim}))
        before = run.placement.structs
        after, _ = jax.eval_shape(run.step, before, run.batch)

    def types(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    assert types(after) == types(before)


@pytest.mark.slow
def test_the_seed_of_the_run_determines_how_gradients_are_rounded():
    """Another seed rounds otherwise; rounding to nearest does not depend on it."""

    def norm(seed: int, rounding: str = "stochastic") -> float:
        across = Int8(rounding=rounding)
        run = prepared("data8", parallel={"gradient_reduction": Reduce(across=across)}).run
        run = prepare(run.model_copy(update={"seed": seed}))
        params = prepare(run.run.model_copy(update={"seed": 0})).compile_init(QUICK)().params
        batch = {name: jax.device_put(x, run.batch[name].sharding) for name, x in batches()[0].items()}
        args = (params, with_rows(batch), jax.numpy.int32(3), {})
        return float(jax.jit(run.gradients).lower(*args).compile(QUICK)(*args).norm)

    assert norm(0) == norm(0) != norm(1)
    assert norm(0, "nearest") == norm(1, "nearest") != norm(0)
