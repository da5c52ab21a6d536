"""The activations that the forward saves by name: their bytes in closed form, and what the backward recomputes."""

from __future__ import annotations

from functools import lru_cache

import pytest

from meshpar.cost.walk import walk
from meshpar.models import Llama
from meshpar.nn.attention.blocks import Blocks
from meshpar.nn.remat import Remat
from meshpar.parallel import data
from meshpar.partition import moved, segments
from tests.program.test_bytes import cost_as_traced, cost_as_written, prepared

LAYERS = 12
ROWS = 32
SEQ = 16
WIDTH = 16
HEADS = 4
KV_HEADS = 2
MLP = 32
ATTENTION = ("q", "k", "v", "attn", "log_mass", "residual")
# Elements of an activation for each token and layer. With sequence parallelism, all devices share them equally.
SIZES = {
    "input": WIDTH, "q": WIDTH, "k": WIDTH * KV_HEADS // HEADS, "v": WIDTH * KV_HEADS // HEADS, "attn": WIDTH,
    "log_mass": HEADS, "residual": WIDTH, "gate": MLP, "up": MLP,
}  # fmt: skip


@lru_cache
def run_with(layout, **remat):
    model = Llama(
        num_layers=LAYERS, hidden_size=WIDTH, num_heads=HEADS, num_kv_heads=KV_HEADS, intermediate_size=MLP,
        vocab_size=32, attention=Blocks(block_size=8), remat=Remat(**remat),
    )  # fmt: skip
    return prepared(layout, model=model)


def saved_bytes(run):
    """Bytes that the traced forward's loop over layers stores for the backward, on one device."""
    loops = (visit.equation for visit in walk(run._traced_step) if visit.primitive == "scan")
    forward = next(loop for loop in loops if loop.params["length"] == LAYERS and not loop.params["reverse"])
    turn = forward.params["jaxpr"].jaxpr.outvars
    stacked = [x.aval for x, one in zip(forward.outvars, turn, strict=True) if x.aval.ndim > one.aval.ndim]
    return sum(x.size * x.dtype.itemsize for x in stacked)


def closed_form(names, num_devices=8):
    return sum(SIZES[name] for name in {"input", *names}) * LAYERS * ROWS * SEQ * 4 // num_devices


SETS = [(), ("log_mass",), ATTENTION, (*ATTENTION, "gate", "up")]
SINGLE = [pytest.param((name,), marks=pytest.mark.slow) for name in SIZES if name != "log_mass"]


@pytest.mark.parametrize("names", [*SETS, *SINGLE])
def test_the_forward_saves_only_the_named_activations(names):
    """Each case is the control of the others: without one of its names, fewer bytes are saved."""
    assert saved_bytes(run_with("data2_fsdp2_tensor2", save=names)) == closed_form(names)


def test_a_policy_saves_the_output_projection_after_it_is_scattered(monkeypatch):
    """Control: partial sums of the whole sequence take twice the bytes, and are scattered again."""
    products = ("q", "k", "v", "gate", "up")
    run = run_with("data2_fsdp2_tensor2", policy="dots_no_batch")
    assert saved_bytes(run) == closed_form((*products, "residual"))
    monkeypatch.setattr(moved, "checkpoint_name", lambda x, name: x)
    before = run_with.__wrapped__("data2_fsdp2_tensor2", policy="dots_no_batch")
    residual = closed_form(("residual",)) - closed_form(())
    assert saved_bytes(before) == closed_form(products) + 2 * residual
    assert before.traced_bytes["tensor",] > run.traced_bytes["tensor",]


def test_attention_is_computed_again_unless_its_result_and_log_mass_are_saved():
    def flops(*names):
        return cost_as_traced(run_with("zero3", save=names))[1]

    without = [tuple(name for name in ATTENTION if name != left_out) for left_out in ("attn", "log_mass")]
    assert flops(*ATTENTION) < min(flops(*names) for names in without)
    assert flops(*ATTENTION, "gate", "up") == cost_as_traced(run_with("zero3", policy="none"))[1]


def test_bytes_and_flops_with_saved_activations_equal_the_traced_step():
    """ZeRO-3 gathers parameters again with any policy: otherwise it would send less over fsdp than with `full`."""
    run = run_with("data2_fsdp2_tensor2", save=ATTENTION)
    assert cost_as_written(run) == cost_as_traced(run)
    full = run_with("data2_fsdp2_tensor2")
    assert run.traced_bytes["fsdp",] == full.traced_bytes["fsdp",]
    assert run.traced_bytes["tensor",] < full.traced_bytes["tensor",]


def test_the_compiled_step_holds_the_saved_activations():
    def temporaries(*names):
        compiled = run_with("data2_fsdp2_tensor2", save=names).compile_step().compiled
        return compiled.memory_analysis().temp_size_in_bytes

    more = (*ATTENTION, "gate", "up")
    assert temporaries(*more) - temporaries() > 0.85 * (closed_form(more) - closed_form(()))


# Without `jax.checkpoint` the product after attention saves its operands a second time, as matrices.
MATRICES = {"data8": LAYERS * (ROWS // 8 * SEQ * WIDTH + WIDTH * WIDTH) * 4, "zero3": 0}


@pytest.mark.parametrize("layout", MATRICES)
def test_without_a_policy_no_norm_and_no_activation_function_is_saved(layout, monkeypatch):
    """The forward saves the activations that have names, and nothing else."""
    everything = closed_form((*ATTENTION, "gate", "up")) + MATRICES[layout]
    assert saved_bytes(run_with(layout, policy="none")) == everything
    monkeypatch.setattr(segments, "_is_cheap", lambda step: False)
    monkeypatch.setattr(data, "CHEAP", data._FREE)
    control = run_with.__wrapped__(layout, policy="none")
    norms_and_hidden = (2 * WIDTH + MLP) * LAYERS * ROWS // 8 * SEQ * 4
    assert saved_bytes(control) >= everything + norms_and_hidden
