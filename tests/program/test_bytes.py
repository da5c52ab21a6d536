"""Bytes and FLOPs of the compiled manual step equal the traced step's and the formulas; GSPMD's bytes do not."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshpar.data import Synthetic
from meshpar.experiment.config import Precision, Run
from meshpar.experiment.prepare import Prepared, prepare
from meshpar.inspection.inspect import inspect
from meshpar.inspection.program.hlo import Collective, collectives_of, total_sent_bytes
from meshpar.mesh.layout import MeshLayout
from meshpar.models import GPT, Llama
from meshpar.nn.decoder import Decoder
from meshpar.nn.lora import LoRA
from meshpar.optim import AdamW
from meshpar.optim.freeze import Freeze
from meshpar.parallel import data
from meshpar.partition import joint
from meshpar.sharding.rules import AxisRules
from meshpar.train.step import Step
from meshpar.tree import flatten_with_paths
from meshpar.verification.trial import QUICK
from tests.layouts import LAYOUTS
from tests.program.oracle import closed_form, share

pytestmark = pytest.mark.matrix

ROOT = Path(__file__).parents[2]
MODEL = Llama(num_layers=3, hidden_size=16, num_heads=4, intermediate_size=32, vocab_size=32)
ROWS = 32
SEQ = 16


def prepared(
    layout: Any, lowering: str = "manual", num_microbatches: int = 1, model: Decoder = MODEL, **settings: Any
) -> Prepared:
    sizes, presets = LAYOUTS[layout] if isinstance(layout, str) else layout
    rules = AxisRules(preset=tuple(presets), **settings.pop("rules", {}))
    settings = {"optim": AdamW(lr=1e-3), "num_steps": 10} | settings
    return prepare(
        Run(
            model=model,
            data=Synthetic(batch_size=ROWS, seq_len=SEQ, vocab_size=32),
            mesh=MeshLayout(**sizes),
            rules=rules,
            lowering=lowering,
            num_microbatches=num_microbatches,
            run_dir="unused",
            **settings,
        )
    )


# XLA:CPU moves a collective out of a loop in which its operand does not change, and merges equal ones.
CODE_MOTION = "while-loop-invariant-code-motion,while-loop-expensive-invariant-code-motion,cse,cse_barrier_expander"


def as_written(run: Prepared) -> Step:
    """The compiled step, without the passes that move or merge collectives."""
    return run.compile_step(QUICK | {"xla_disable_hlo_passes": CODE_MOTION})


def sent_as_written(run: Prepared) -> dict[Any, Fraction]:
    return cost_as_written(run)[0]


def cost_as_written(run: Prepared) -> tuple[dict[Any, Fraction], int]:
    """The bytes that the compiled step sends, by axes, and the FLOPs of its products."""
    inspection = inspect(as_written(run).compiled, run.mesh)
    return sent_over(inspection.collectives), inspection.flops


def cost_as_traced(run: Prepared) -> tuple[Any, Fraction]:
    """The bytes and the FLOPs of the traced step."""
    return run.traced_bytes, sum((run.traced_flops or {}).values(), Fraction(0))


@lru_cache
def found_in(layout: str, lowering: str = "manual", num_microbatches: int = 1) -> list[Collective]:
    run = prepared(layout, lowering, num_microbatches)
    return collectives_of(run.compile_step().compiled.as_text(), run.mesh)


def sent_over(found: list[Collective]) -> dict[Any, Fraction]:
    sent = {axes: total_sent_bytes(one for one in found if one.axes == axes) for axes in {c.axes for c in found}}
    return {axes: bytes_ for axes, bytes_ in sent.items() if bytes_}


def parameter_size(run: Prepared, layers: bool) -> int:
    arrays = flatten_with_paths(run.specs).values()
    return sum(spec.num_bytes for spec in arrays if ("layers" in spec.dims) == layers)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("layout", "num_microbatches"),
    [
        pytest.param(layout, num, marks=[] if (i + num) % 2 else pytest.mark.slow)
        for i, layout in enumerate(LAYOUTS)
        for num in (1, 4)
    ],
)
def test_bytes_and_flops_of_the_compiled_step_equal_the_traced_step(layout, num_microbatches):
    run = prepared(layout, "manual", num_microbatches)
    assert cost_as_written(run) == cost_as_traced(run)
    assert run.traced_bytes == closed_form(run)


@pytest.mark.parametrize("layout", ["zero3", "data2_fsdp2_tensor2"])
def test_full_remat_needs_more_flops(layout):
    """Control: the count depends on the policy."""
    plain, again = (prepared(layout, model=Llama(**SIZES, remat=remat)) for remat in ("none", "full"))
    assert cost_as_traced(again)[1] > 1.2 * cost_as_traced(plain)[1]


@pytest.mark.parametrize("layout", ["zero3", "hsdp2x4"])
def test_gathers_that_xla_moves_out_of_a_loop_are_sent_less_often(layout):
    run = prepared(layout, "manual", 4)
    sent = sent_over(found_in(layout, "manual", 4))
    assert sent == closed_form(run, on_cpu=True)
    assert sent["fsdp",] < run.traced_bytes["fsdp",]


SIZES = {
    "num_layers": 3,
    "hidden_size": 16,
    "num_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 32,
    "max_seq_len": SEQ,
}
OTHERS = {
    "remat": lambda layout: prepared(layout, num_microbatches=2, model=Llama(**SIZES, remat="full")),
    "gpt": lambda layout: prepared(layout, model=GPT(**SIZES, tie_embeddings=True, dropout=0.1, remat="dots")),
    "gpt_biases_kept": lambda layout: prepared(layout, model=GPT(**SIZES)),
    "bfloat16": lambda layout: prepared(layout, precision=Precision(compute="bfloat16")),
    "mixed": lambda layout: prepared(
        layout,
        precision=Precision(params="bfloat16", compute="bfloat16", gradients="bfloat16", master="float32"),
    ),
    "key_heads_on_all": lambda layout: prepared(layout, model=Llama(**SIZES, num_kv_heads=1), rules={"kv_heads": ()}),
}
OPTIONS = {"attn_bias": "all", "mlp_bias": True, "qk_norm": True, "rotary_fraction": 0.5, "window": 4}
OTHERS |= {
    "options": lambda layout: prepared(layout, model=Llama(**SIZES, **OPTIONS)),
    "lora": lambda layout: prepared(layout, model=Llama(**SIZES), lora=LoRA(rank=2, paths=("blocks.**",))),
    "frozen": lambda layout: prepared(
        layout, model=Llama(**SIZES), freeze=(Freeze(paths=("embedding", "blocks.mlp.**")),)
    ),
}
CASES = [
    *(("remat", layout) for layout in LAYOUTS),
    *(("gpt", layout) for layout in ("zero1", "zero3", "tensor4_sp", "data2_fsdp2_tensor2")),
    *(("mixed", layout) for layout in ("data8", "zero1", "zero2", "zero3")),
    ("gpt_biases_kept", "hsdp2x4"), ("bfloat16", "zero2"), ("bfloat16", "zero3"), ("key_heads_on_all", "tensor4"),
    ("options", "data2_fsdp2_tensor2"), ("lora", "tensor4"), ("lora", "data2_fsdp2_tensor2"),
    ("key_heads_on_all", "tensor4_sp"), ("key_heads_on_all", "data2_fsdp2_tensor2"),
]  # fmt: skip
# Layouts that gather or reduce in the same way as others: the whole table runs with -m slow.
SWEPT = {
    *(("remat", layout) for layout in ("data8", "zero1", "zero2", "hsdp2x4", "tensor4")),
    ("mixed", "data8"),
    ("mixed", "zero2"),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("model", "layout"), [pytest.param(*case, marks=pytest.mark.slow if case in SWEPT else []) for case in CASES]
)
def test_bytes_and_flops_of_other_models_equal_the_traced_step(model, layout):
    run = OTHERS[model](layout)
    assert cost_as_written(run) == cost_as_traced(run)
    assert run.traced_bytes == closed_form(run)


OVER_CONTEXT = {"seq": ("context",), "embed": ("fsdp", "context")}
SHARED_ROWS = {
    # kind: (mesh, presets, rules, remat)
    "ring": ({"data": 2, "context": 4}, ["context"], {}, "full"),
    "all_gather": ({"fsdp": 2, "context": 2, "tensor": 2}, ["fsdp", "megatron_sp"], OVER_CONTEXT, "none"),
    "ulysses": ({"context": 4, "tensor": 2}, ["megatron", "context"], {"kv_heads": ("tensor",)}, "none"),
    "hybrid": ({"data": 2, "context": 4}, ["context"], {}, "none"),
    "pairs": ({"pipe": 2, "context": 4}, ["pipeline", "context"], {}, "none"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind == "pairs" else []) for kind in SHARED_ROWS]
)
def test_bytes_and_flops_with_context_parallelism_equal_the_traced_step(kind):
    run = with_shared_rows(kind)
    assert cost_as_written(run) == cost_as_traced(run)
    assert run.traced_bytes == closed_form(run)


def with_shared_rows(kind):
    sizes, presets, rules, remat = SHARED_ROWS[kind]
    sizes_of_model = SIZES | {"num_heads": 8, "num_layers": 4}  # a fourth of each size is a whole number
    model = Llama(**sizes_of_model, num_kv_heads=8 if kind == "ulysses" else 2, remat=remat)
    # With zigzag, halves of blocks would have one token, whose products XLA turns into multiplications.
    context = {"kind": "ring" if kind == "pairs" else kind, "layout": "auto" if kind == "ulysses" else "contiguous"}
    if kind == "hybrid":
        context["group"] = 2
    parallel = {"context": context}
    if kind == "pairs":
        parallel["pipeline"] = {"kind": "1f1b", "num_microbatches": 2}
    num = 1 if kind == "pairs" else 2
    return prepared((sizes, presets), num_microbatches=num, model=model, rules=rules, parallel=parallel)


@pytest.mark.slow
def test_control_a_joint_kernel_that_is_kept_for_the_backward_is_not_gathered_again(monkeypatch):
    """Planted: q, k and v are joined outside of the product, so that remat keeps the joint kernel of ZeRO-3."""
    of_one = joint.matmul
    monkeypatch.setattr(data, "CHEAP", data.CHEAP - {"concatenate"})
    monkeypatch.setattr(joint, "matmul", lambda x, *kernels: of_one(x, jnp.concatenate(kernels, axis=1)))
    run = with_shared_rows("all_gather")
    qkv = 16 * 12 * 2 * 4  # gathered over four devices, of which each pair shares the heads
    kept = 2 * 4 * share(4, qkv // 2)
    sent = sent_as_written(run)
    assert closed_form(run)["fsdp", "context"] - sent["fsdp", "context"] == kept


SEVERAL = {"num_microbatches": 2}
GPT_FULL = GPT(**SIZES, remat="full")
LLAMA_KEPT = Llama(**SIZES, num_kv_heads=1, remat="dots")
OVERLAPPED = {
    "tensor": lambda way: prepared("tensor4_sp", parallel={"tensor": {"overlap": way}}),
    "tensor_recomputed": lambda way: prepared(
        "tensor4_sp", parallel={"tensor": {"overlap": way}}, model=GPT_FULL, **SEVERAL
    ),
    "tensor_fsdp_kept": lambda way: prepared(
        "data2_fsdp2_tensor2", parallel={"tensor": {"overlap": way}}, model=LLAMA_KEPT, rules={"kv_heads": ()}
    ),
    "fsdp": lambda way: prepared("zero3", parallel={"fsdp": {"overlap": way}}, **SEVERAL),
    "fsdp_recomputed": lambda way: prepared("hsdp2x4", parallel={"fsdp": {"overlap": way}}, model=GPT_FULL),
    "fsdp_tensor_kept": lambda way: prepared(
        "data2_fsdp2_tensor2", parallel={"fsdp": {"overlap": way}}, model=LLAMA_KEPT, rules={"kv_heads": ()}
    ),
    "bfloat16": lambda way: prepared(
        "zero3", parallel={"fsdp": {"overlap": way}}, precision=Precision(compute="bfloat16")
    ),
    "tensor_lora": lambda way: prepared(
        "tensor4_sp", parallel={"tensor": {"overlap": way}}, lora=LoRA(rank=2, paths=("blocks.**",))
    ),
    "fsdp_lora": lambda way: prepared(
        "zero3", parallel={"fsdp": {"overlap": way}}, lora=LoRA(rank=2, paths=("blocks.**",))
    ),
    "fsdp_frozen": lambda way: prepared(
        "zero3", parallel={"fsdp": {"overlap": way}}, freeze=(Freeze(paths=("embedding", "blocks.mlp.**")),)
    ),
    "fsdp_reduced": lambda way: prepared(
        "hsdp2x4", parallel={"fsdp": {"overlap": way}, "gradient_reduction": {"algorithm": "ring"}}
    ),
}
WAYS = {name: "bidirectional" if i % 2 else "ring" for i, name in enumerate(OVERLAPPED)}


IN_CI = ("tensor_recomputed", "fsdp_tensor_kept", "bfloat16")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.slow) for name in OVERLAPPED]
)
def test_bytes_and_flops_with_overlap_equal_the_traced_step(name):
    run = OVERLAPPED[name](WAYS[name])
    step = as_written(run)
    inspection = inspect(step.compiled, run.mesh)
    assert (sent_over(inspection.collectives), inspection.flops) == cost_as_traced(run)
    assert run.traced_bytes == closed_form(run)
    assert any(one.kind == "collective_permute" for one in run.collectives(step.program.jaxpr))


def test_frozen_kernels_do_not_gather_their_inputs_again():
    """An MLP with overlap gathers the residual stream once more for its kernels' gradients, if they are trained."""
    overlap = {"parallel": {"tensor": {"overlap": "ring"}}}
    frozen = prepared("tensor4_sp", freeze=(Freeze(paths=("blocks.mlp.**",)),), **overlap)
    stream = ROWS // 2 * SEQ * 16 * 4
    trained = prepared("tensor4_sp", **overlap)
    assert trained.traced_bytes["tensor",] - frozen.traced_bytes["tensor",] == 3 * share(4, stream)


def test_8_bits_add_the_scales_alone():
    """Of a row or a column 4 bytes: [B, S] and [N] for o and down, [B, S] for the others' dy, [N] for each dw."""
    plain = prepared("data2_fsdp2_tensor2")
    run = prepared("data2_fsdp2_tensor2", precision=Precision(matmul="fp8"))
    assert cost_as_written(run) == cost_as_traced(run)
    tokens = ROWS // 4 * SEQ
    over_inputs = 2 * (tokens + 16) + 5 * tokens
    columns = 3 * 8 + 16 + 2 * 16 + 16  # half of q, k, v; o; half of gate, up; down
    added = {("tensor",): 2 * share(2, 3 * 4 * over_inputs), ("data", "fsdp"): 2 * share(4, 3 * 4 * columns)}
    without = plain.traced_bytes or {}
    sent = run.traced_bytes or {}
    assert {axes: sent[axes] - without.get(axes, 0) for axes in sent if sent[axes] != without.get(axes)} == added


def test_8_bits_sum_the_gradients_of_keys_and_values_in_place_of_those_of_their_kernels():
    """Where key heads are whole: [B, S, h] of k and of v, not [D, h] of their kernels. All devices project them."""
    model, rules = Llama(**SIZES, num_kv_heads=1), {"kv_heads": ()}
    plain = prepared("tensor4", model=model, rules=rules)
    run = prepared("tensor4", model=model, rules=rules, precision=Precision(matmul="fp8"))
    assert cost_as_written(run) == cost_as_traced(run)
    tokens = ROWS // 2 * SEQ
    scales = 3 * (tokens + 16)  # of the inputs of o, and of down: the backward computes its segment again
    scales += 3 * tokens  # of the outputs of q, gate and up
    keys = 2 * 4 * (tokens - 16)
    columns = 4 + 2 * 4 + 16 + 2 * 8 + 16  # a fourth of q; k, v; o; a fourth of gate, up; down
    added = {("tensor",): 2 * share(4, 3 * 4 * (scales + keys)), ("data",): 2 * share(2, 3 * 4 * columns)}
    without = plain.traced_bytes or {}
    sent = run.traced_bytes or {}
    assert {axes: sent[axes] - without.get(axes, 0) for axes in sent if sent[axes] != without.get(axes)} == added


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["options", "lora", "frozen"])
def test_bytes_and_flops_of_other_models_equal_the_traced_step_in_every_layout(model, layout):
    test_bytes_and_flops_of_other_models_equal_the_traced_step(model, layout)


def test_gradients_of_frozen_parameters_are_never_reduced():
    """Only LoRA's gradients are sent: 2(n-1)/n of rank * (inputs + outputs) a projection, in the test's own numbers."""
    adapted = prepared("data8", lora=LoRA(rank=2))
    thin = 4 * MODEL.num_layers * 2 * (16 + 16) * 4  # q, k, v, o; rank 2; float32
    assert total(adapted) == 2 * share(8, thin) < total(prepared("data8")) / 4
    assert {path.split(".")[-2] for path in flatten_with_paths(adapted.placement.opt_state) if "blocks" in path} == {
        "lora"
    }


def total(run: Prepared) -> Fraction:
    """The bytes that a step sends without its scalars; no axis may shard an activation."""
    scalars = 2 * share(8, 4 + 4) + (2 * share(8, 4) if run.ctx.storage("embed") else 0)
    return sum((run.traced_bytes or {}).values(), Fraction(0)) - scalars


def test_the_traced_bytes_equal_the_textbooks():
    """3(n-1)/n P for FSDP's layers and 2(n-1)/n P for the others, in the test's own numbers."""
    inside, outside = (parameter_size(prepared("zero3"), layers) for layers in (True, False))
    sent = {name: total(prepared(name)) for name in ("data8", "zero1", "zero2", "zero3")}
    assert sent["data8"] == sent["zero1"] == sent["zero2"] == 2 * share(8, inside + outside)
    assert sent["zero3"] == 3 * share(8, inside) + 2 * share(8, outside)
    hybrid = prepared("hsdp2x4").traced_bytes or {}
    assert hybrid["replica",] == 2 * share(2, (inside + outside) // 4)
    assert hybrid["fsdp",] == 3 * share(4, inside) + 2 * share(4, outside) + 2 * share(4, 4)


def test_tensor_parallelism_sends_the_closed_form_with_and_without_sharded_sequences():
    """8(t-1)/t b s h for each layer and pass."""
    layers = {}
    for name in ("tensor4", "tensor4_sp"):
        three, one = (prepared(name, model=Llama(**SIZES | {"num_layers": n})).traced_bytes for n in (3, 1))
        layers[name] = (three or {})["tensor",] - (one or {})["tensor",]
    assert layers["tensor4"] == layers["tensor4_sp"] == 2 * 8 * share(4, 16 * SEQ * 16 * 4)


def test_control_gspmd_sends_more_than_the_closed_form():
    form = prepared("zero3").traced_bytes or {}
    assert total_sent_bytes(found_in("zero3", "auto", 1)) > 1.2 * sum(form.values())


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["data8", "zero1", "zero2", "hsdp2x4"])
def test_gradients_are_reduced_once_whatever_the_microbatches(layout):
    """ZeRO-3's reduce-scatter runs in each layer; the sum over replicas runs once."""
    kinds = ["all_reduce"] if layout == "hsdp2x4" else ["all_reduce", "reduce_scatter"]

    def reduced(num_microbatches: int) -> Fraction:
        found = found_in(layout, "manual", num_microbatches)
        return sum((total_sent_bytes(found, kind) for kind in kinds), Fraction(0))

    assert reduced(1) == reduced(4) > 0


def test_gspmd_reduces_gradients_in_every_microbatch():
    def reductions(num_microbatches: int) -> int:
        return sum(c.times for c in found_in("data8", "auto", num_microbatches) if c.kind == "all_reduce")

    assert reductions(4) > reductions(1)


@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=[] if one in ("zero1", "zero3") else pytest.mark.slow) for one in LAYOUTS]
)
def test_the_optimizer_communicates_only_zero1s_gather(layout):
    """AdamW is elementwise, so every other collective of the step is in the manual region."""
    outside = [c for c in found_in(layout, "manual", 1) if "shard_map" not in c.op_name]
    assert {c.kind for c in outside} <= {"all_gather"}
    assert len(outside) == (len(jax.tree.leaves(prepared(layout).specs)) if layout == "zero1" else 0)


CASES_BEYOND = [("9", "ring", "none"), ("9", "bidirectional", "none"), ("12", "bidirectional", "full")]


@pytest.mark.parametrize(
    ("num_devices", "way", "remat"),
    [pytest.param(*case, marks=pytest.mark.slow if i else []) for i, case in enumerate(CASES_BEYOND)],
)
def test_bytes_of_an_overlap_over_more_than_eight_devices_equal_the_traced_step(num_devices, way, remat):
    """Rings of more than eight devices are loops, smaller ones are unrolled."""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": num_devices, "JAX_NUMPY_DTYPE_PROMOTION": "strict"}
    program = [sys.executable, "-m", "tests.program.more_devices", way, remat]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "equal\n", done.stdout + done.stderr[-2000:]
