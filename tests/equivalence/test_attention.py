"""Attention in blocks computes what the reference does, in every layout of both lowerings."""

from __future__ import annotations

from itertools import product

import pytest

from meshpar.nn.attention import Blocks
from tests.equivalence.conftest import on_one_device, outcome, prepared
from tests.layouts import LAYOUTS

SIZES = [4, 6]
"""Sizes of a block. Rows have 16 tokens, so blocks of 6 overlap."""
ALL = [*product(["llama", "llama_gqa_options", "gpt_gqa_tied"], LAYOUTS, ["manual", "auto"], SIZES)]
SAMPLE = [
    ("llama", "data2_fsdp2_tensor2", "manual", 6),
    ("llama_gqa_options", "data2_fsdp2_tensor2", "auto", 4),
]
CASES = [
    pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.slow, id="-".join(map(str, case))) for case in ALL
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "layout", "lowering", "size"), CASES)
def test_blocks_equal_the_reference_on_one_device(model, layout, lowering, size):
    run = prepared(model, layout, lowering, 2, fields={"attention": Blocks(block_size=size)})
    assert outcome(run).difference(on_one_device(model)) < 1e-10
