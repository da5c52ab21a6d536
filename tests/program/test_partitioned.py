"""The bytes of a partitioned model: those of the compiled step, of meshpar's own llama, and at most GSPMD's."""

from __future__ import annotations

import time
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Any

import jax
import numpy as np
import optax
import pytest

from meshpar import AxisRules, MeshLayout, training
from meshpar.cost.traced import Collective as Traced
from meshpar.cost.traced import gathers, traced_collectives, traffic
from meshpar.inspection.program.hlo import Collective, collectives_of, total_sent_bytes
from meshpar.models import Llama
from meshpar.partition.plan import Scope
from meshpar.partition.program import Use
from meshpar.train.training import Training
from meshpar.verification.trial import QUICK
from tests.layouts import LAYOUTS
from tests.program.test_bytes import CODE_MOTION, ROWS, SEQ, prepared, sent_over
from tests.xla import AS_USERS
from tests.zoo import MODELS
from tests.zoo import llama as plain
from tests.zoo.parts import SEQ as ZOO_SEQ
from tests.zoo.parts import VOCAB, sentences

pytestmark = pytest.mark.usefixtures("lines_of_callers")
OWN = Llama(
    num_layers=plain.LAYERS, hidden_size=plain.WIDTH, num_heads=plain.HEADS, num_kv_heads=plain.KV_HEADS,
    intermediate_size=plain.HIDDEN, vocab_size=VOCAB, max_seq_len=SEQ,
)  # fmt: skip
FSDP_TENSOR = {"fsdp": 2, "tensor": 4}, ["fsdp", "megatron"]


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@lru_cache
def zoo(model: str) -> Any:
    return MODELS[model]()


@lru_cache
def adopted(model: str, layout: str, lowering: str = "manual") -> Training:
    found = zoo(model)
    arrays = sentences(ROWS, SEQ, 32) if model == "llama" else found.batch
    sizes, presets = FSDP_TENSOR if layout == "fsdp2_tensor4" else LAYOUTS[layout]
    mesh = MeshLayout(**sizes).build(jax.devices()[:8])
    batch = {name: np.asarray(x, x.dtype if x.dtype.kind != "f" else "float32") for name, x in arrays.items()}
    named = {name: ("batch", "seq") for name, x in batch.items() if x.shape[1:] in ((SEQ,), (ZOO_SEQ,))}
    if not named or lowering == "auto":  # a rule for the residual stream of a sequence would be an error
        presets = ["megatron" if preset == "megatron_sp" else preset for preset in presets]
    return training(
        found.init, found.loss, optax.adamw(1e-3), batch, mesh=mesh, rules=AxisRules(preset=presets, **found.rules),
        dims=found.dims, batch_dims=named, carried=found.carried, draws=found.draws, lowering=lowering,
    )  # fmt: skip


def collectives(model: str, layout: str) -> list[Traced]:
    step = adopted(model, layout)
    found = traced_collectives(jax.make_jaxpr(step.step)(step.placement.structs, step.batch))
    return found + gathers(step.placement.updated)


def traced(model: str, layout: str) -> dict[Any, Any]:
    return traffic(collectives(model, layout))


def by_axes(found: Any) -> dict[Any, float]:
    return {axes: float(num_bytes) for axes, num_bytes in found.items()}


@pytest.mark.sample(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plain_llama_sends_what_our_own_sends(layout):
    """Eighty lines of Linen that know of no mesh send the bytes of the layers that were written for one.

    They do not send the number of tokens: their loss is a mean, and `kind: llama` counts the targets.
    """
    own = prepared(layout, model=OWN)
    axes = own.ctx.loss_axes
    num_devices = prod(own.mesh.shape[axis] for axis in axes)
    count = Fraction(2 * (num_devices - 1) * 4, num_devices)
    sent = own.traced_bytes | {axes: own.traced_bytes[axes] - count}
    assert by_axes(traced("llama", layout)) == by_axes(sent)


def test_planted_a_value_that_each_use_gathers_is_sent_more_often(monkeypatch):
    expected = by_axes(prepared("tensor4_sp", model=OWN).traced_bytes)
    monkeypatch.setattr(Use, "__hash__", object.__hash__)
    monkeypatch.setattr(Use, "__eq__", object.__eq__)
    assert by_axes(traced("llama", "tensor4_sp"))["tensor",] > 1.3 * expected["tensor",]


COMPILED = [("llama", "data2_fsdp2_tensor2"), ("vit", "tensor4"), ("resnet", "zero3"), ("gshard", "hsdp2x4")]


@lru_cache
def compiled(model: str, layout: str) -> list[Collective]:
    step = adopted(model, layout).compile_step(QUICK | {"xla_disable_hlo_passes": CODE_MOTION})
    return collectives_of(step.compiled.as_text(), adopted(model, layout).mesh)


@pytest.mark.parametrize(("model", "layout"), COMPILED)
def test_the_bytes_of_a_compiled_step_equal_the_traced_ones(model, layout):
    assert by_axes(sent_over(compiled(model, layout))) == by_axes(traced(model, layout))


@pytest.mark.parametrize(("model", "layout"), COMPILED[:2])
def test_inspect_names_the_lines_that_explain_names(model, layout):
    """So it does for ZeRO's gathers, also of a parameter that only a function of JAX's reads, as an embedding."""
    moves = {(one.line.split(" (")[0], one.move.kind) for one in adopted(model, layout).activations}
    found = {(one.source, one.kind.replace("_", "-")) for one in compiled(model, layout)}
    assert moves
    assert moves <= found
    assert not [source for source, _ in found if "/meshpar/partition/" in source or "/meshpar/interop/" in source]
    assert not [source for source, kind in found if kind == "all-gather" and "/tests/zoo/" not in source]


def test_a_plain_nnx_transformer_gathers_storage_twice_and_scatters_it_once():
    """Over `fsdp` beside `tensor`: for the forward and again for the backward, and nothing of the activations."""
    step = adopted("lm1b_nnx", "fsdp2_tensor4")
    parameters = jax.tree.leaves(step.placement.structs.params)
    shards = [x.sharding.shard_shape(x.shape) for x in parameters if "fsdp" in x.sharding.spec]
    once = sum(4 * prod(shape) for shape in shards)  # half of what a group of two holds
    whole = sum(4 * prod(x.sharding.shard_shape(x.shape)) for x in parameters if "fsdp" not in x.sharding.spec)
    sent = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), Fraction())
    for one in collectives("lm1b_nnx", "fsdp2_tensor4"):
        if one.axes == ("fsdp",):
            sent[one.kind] += one.times * one.sent_bytes
    assert sent["reduce_scatter"] == once
    assert once < sent["all_gather"] <= 2 * once
    assert whole <= sent["all_reduce"] <= whole + 16  # gradients, the loss and its count


def test_planted_tokens_that_no_product_gathers_end_as_sums_of_all_experts(monkeypatch):
    """GShard's experts get one product with the tokens, and give back another one, beside sequence parallelism."""
    expected = by_axes(traced("gshard", "tensor4_sp"))
    monkeypatch.setattr(Scope, "_sent", lambda *choice: 0)
    assert by_axes(traced("gshard", "tensor4_sp"))["tensor",] > 3 * expected["tensor",]


IN_CI = {*COMPILED, ("llama", "data8"), ("gshard", "tensor4_sp")}
AGAINST_GSPMD = [
    pytest.param(model, layout, marks=[] if (model, layout) in IN_CI else [pytest.mark.slow], id=f"{model}-{layout}")
    for model in ("llama", "vit", "gshard", "whisper", "bert")
    for layout in LAYOUTS
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("model", "layout"), AGAINST_GSPMD)
def test_a_partitioned_step_sends_no_more_than_gspmds(model, layout):
    sent = {}
    for lowering in ("manual", "auto"):
        step = adopted(model, layout, lowering).compile_step(QUICK)
        sent[lowering] = total_sent_bytes(collectives_of(step.compiled.as_text(), adopted(model, layout).mesh))
    print(f"{model} {layout}: {float(sent['manual'] / sent['auto']):.3f} of GSPMD's bytes")
    assert sent["manual"] <= sent["auto"]


def seconds_to_compile(model: str, layout: str, lowering: str) -> float:
    """CPU seconds of tracing and compiling a step."""
    jax.clear_caches()
    step = adopted.__wrapped__(model, layout, lowering)
    start = time.process_time()
    step.compile_step(AS_USERS)
    return time.process_time() - start


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), COMPILED)
def test_a_partitioned_step_compiles_in_at_most_1_3_of_gspmds_seconds(model, layout):
    both = [[seconds_to_compile(model, layout, lowering) for lowering in ("manual", "auto")] for _ in range(3)]
    manual, auto = map(min, zip(*both, strict=True))
    print(f"{model} {layout}: {manual:.2f} s, {manual / auto:.2f} of GSPMD's")
    assert manual <= 1.3 * auto
