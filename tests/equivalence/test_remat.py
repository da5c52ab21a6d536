"""Whichever activations are saved or recomputed, a step computes what one device computes."""

from __future__ import annotations

import pytest

from meshpar.nn.attention.blocks import Blocks
from meshpar.nn.remat import Remat
from tests.equivalence.conftest import MODELS, on_one_device, outcome, prepared

ATTENTION = ("q", "k", "v", "attn", "log_mass", "residual")
CASES = [
    # Each activation alone, and most of them together, under ZeRO-3, sequence parallelism and both.
    *[((name,), "zero3", "manual") for name in MODELS["llama"].activations],
    (ATTENTION, "zero3", "manual"),
    (ATTENTION, "tensor4_sp", "manual"),
    ((*ATTENTION, "gate"), "data2_fsdp2_tensor2", "manual"),
    ((*ATTENTION, "gate"), "data2_fsdp2_tensor2", "auto"),
]
SAMPLE = [((*ATTENTION, "gate"), "data2_fsdp2_tensor2", "manual")]


@pytest.mark.parametrize(
    ("names", "layout", "lowering"),
    [pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.slow) for case in CASES],
)
def test_saved_activations_equal_to_one_device(names, layout, lowering):
    fields = {"remat": Remat(save=names), "attention": Blocks(block_size=4)}
    got = outcome(prepared("llama", layout, lowering, 1, fields=fields))
    assert got.difference(on_one_device("llama")) < 1e-10
