"""The theorem: every layout, in both lowerings, computes what one device computes."""

from __future__ import annotations

from itertools import product

import pytest

from tests.equivalence.conftest import MODELS, on_one_device, outcome, prepared
from tests.layouts import LAYOUTS

EVERY = list(product(MODELS, LAYOUTS, ["manual", "auto"], [1, 4]))
# Each layout in each lowering runs with two models, one with accumulation and one without.
SAMPLE = [
    (model, layout, lowering, accumulation)
    for i, (layout, lowering) in enumerate(product(LAYOUTS, ["manual", "auto"]))
    for model, accumulation in [(list(MODELS)[i % 4], 1), (list(MODELS)[(i + 1 + i // 4) % 4], 4)]
] + [
    ("llama_gqa_options", "data2_fsdp2_tensor2", "manual", 1),
]
CASES = [
    pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.slow, id="-".join(map(str, case))) for case in EVERY
]


@pytest.mark.parametrize(("model", "layout", "lowering", "accumulation"), CASES)
def test_every_layout_is_equal_to_one_device(model, layout, lowering, accumulation):
    got = outcome(prepared(model, layout, lowering, accumulation))
    assert got.difference(on_one_device(model)) < 1e-10


def test_control_dropout_changes_the_numbers():
    """Otherwise equal masks would prove nothing."""
    with_dropout = on_one_device("gpt_dropout_remat")
    assert abs(with_dropout.losses - on_one_device("gpt_gqa_tied").losses).min() > 1e-6
