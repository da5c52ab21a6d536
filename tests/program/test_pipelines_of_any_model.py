"""The bytes, FLOPs and memory of a user's model in stages: of its messages, its forwards and its schedule."""

from __future__ import annotations

from functools import lru_cache

import jax
import optax
import pytest

from meshpar import AxisRules, MeshLayout, training
from meshpar.inspection.inspect import Inspection, inspect
from meshpar.inspection.program.hlo import total_sent_bytes
from meshpar.parallel.pipeline.get_schedule import get_schedule
from meshpar.parallel.strategies import Parallel
from meshpar.train.training import Training
from tests.equivalence.test_pipelines_of_any_model import translating
from tests.program.test_pipelines import TICKS, needed
from tests.zoo import llama, stacked_nnx
from tests.zoo.parts import SEQ, VOCAB, sentences

MODELS = {"llama": llama, "stacked_nnx": stacked_nnx}
LAYERS, ROWS, WIDTH, STAGES = 8, 4, 32, 4
MESSAGE = ROWS * SEQ * WIDTH * 4
HEAD = 3 * 2 * ROWS * SEQ * WIDTH * VOCAB
"""FLOPs of the output projection for a microbatch: forward, and the gradients of both operands."""


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def made(model: str, kind: str | None, m: int) -> Training:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODELS[model], "LAYERS", LAYERS)
        zoo = MODELS[model].build()
        layout = MeshLayout(pipe=STAGES) if kind else MeshLayout()
        schedule = get_schedule(kind, STAGES, m) if kind else None
        built = training(
            zoo.init, zoo.loss, optax.sgd(0.1), sentences(ROWS * m, SEQ, VOCAB), dims=zoo.dims,
            mesh=layout.build(jax.devices()[: layout.requested()]), parallel=Parallel(pipeline=schedule),
            rules=AxisRules(preset="pipeline" if kind else "replicated", **zoo.rules),
        )  # fmt: skip
        _ = built.step  # traced here, with these layers
        return built


@lru_cache
def inspected(model: str, kind: str | None, m: int) -> Inspection:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODELS[model], "LAYERS", LAYERS)
        built = made(model, kind, m)
        return inspect(built.compile_step().compiled, built.mesh)


@pytest.mark.parametrize(
    "kind", ["1f1b", *(pytest.param(k, marks=pytest.mark.slow) for k in ("gpipe", "zb_h2", "zbv"))]
)
def test_the_bytes_over_pipe_equal_those_of_the_messages(kind):
    sent = total_sent_bytes(inspected("llama", kind, 8).collectives, "collective_permute", ["pipe"])
    assert STAGES * sent == MESSAGE * needed(get_schedule(kind, STAGES, 8), STAGES).total()


def loops_with_messages(jaxpr) -> list[int]:
    """The lengths of the outermost loops in which stages send."""
    found = []
    for eqn in jaxpr.eqns:
        inner = [x for value in eqn.params.values() for x in (value if isinstance(value, tuple) else (value,))]
        inner = [getattr(x, "jaxpr", x) for x in inner if hasattr(x, "eqns") or hasattr(x, "jaxpr")]
        if eqn.primitive.name == "scan" and "ppermute" in str(eqn.params["jaxpr"]):
            found.append(eqn.params["length"])
        else:
            found += [length for one in inner for length in loops_with_messages(one)]
    return found


@pytest.mark.parametrize("kind", [k if k == "zb_h1" else pytest.param(k, marks=pytest.mark.slow) for k in TICKS])
def test_a_step_has_the_ticks_of_the_formula(kind):
    """In 3 m of them, m the microbatches of each chunk, a stage computes: the rest is its bubble."""
    built = made("stacked_nnx", kind, 8)
    step = jax.make_jaxpr(built.step)(built.placement.structs, built.batch)
    expected = TICKS[kind](STAGES, 8, get_schedule(kind, STAGES, 8).chunks_per_stage)
    assert loops_with_messages(step.jaxpr) == [expected]
    ticks, _ = built.pipeline.plan(built.ctx)
    assert len(ticks.pattern) == expected


@pytest.mark.slow
def test_the_bytes_over_pipe_of_two_stacks_are_one_message_for_each_place_between_stages(float64):
    """A message has room for the decoder's, of two arrays. Layers of both stacks move to their stages, and back."""
    zoo = translating()
    made = training(
        zoo.init, zoo.loss, optax.sgd(0.1), dict(zoo.batch), compute_dtype="float64",
        mesh=MeshLayout(pipe=STAGES).build(jax.devices()[:STAGES]), dims=zoo.dims,
        rules=AxisRules(preset="pipeline", **zoo.rules),
        parallel=Parallel(pipeline=get_schedule("1f1b", STAGES, 8)),
    )  # fmt: skip
    collectives = inspect(made.compile_step().compiled, made.mesh).collectives
    in_ticks = [one for one in collectives if "while" in one.op_name]
    message = 2 * len(zoo.batch["x"]) // 8 * zoo.batch["x"].shape[1] * 8
    sent = STAGES * total_sent_bytes(in_ticks, "collective_permute", ["pipe"])
    assert sent == message * needed(get_schedule("1f1b", STAGES, 8), STAGES).total()


@pytest.mark.parametrize("model", ["llama", pytest.param("stacked_nnx", marks=pytest.mark.slow)])
def test_the_flops_of_a_stage_are_its_part_of_one_devices(model):
    """Three forwards; four of a layer that the user's own `nnx.remat` computes again. The last stage has the head."""
    whole = inspected(model, None, 8).flops
    expected = (whole - 8 * HEAD) / STAGES + 8 * HEAD
    assert expected <= inspected(model, "1f1b", 8).flops <= 1.001 * expected


def test_the_memory_of_1f1b_does_not_grow_with_the_microbatches():
    few, many = (inspected("llama", "1f1b", m).memory.temporaries for m in (8, 64))
    assert many <= 1.02 * few


@pytest.mark.slow
def test_a_layer_that_the_user_computes_again_is_not_held():
    """The residuals of a microbatch are then those of its layers' inputs."""
    held = {kind: inspected("stacked_nnx", kind, 8).memory.temporaries for kind in ("1f1b", None)}
    assert held["1f1b"] < held[None] / 3
