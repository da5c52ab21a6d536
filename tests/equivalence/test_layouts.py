"""The theorem: every layout, in both lowerings, computes what one device computes."""

from __future__ import annotations

from itertools import product

import jax
import numpy as np
import pytest

from meshpar.verification.trial import QUICK
from tests.equivalence.conftest import MODELS, first_state, on_one_device, outcome, prepared
from tests.layouts import LAYOUTS

pytestmark = pytest.mark.matrix

REFUSED = ("llama_experts_some_layers", 4)  # it balances by the load of the step, which its first microbatch lacks
EVERY = [case for case in product(MODELS, LAYOUTS, ["manual", "auto"], [1, 4]) if (case[0], case[-1]) != REFUSED]
# Each layout in the manual lowering, every second with accumulation too, and the others under GSPMD.
FOUR = list(MODELS)[:4]
SAMPLE = [
    *((FOUR[i % 4], layout, "manual", 1) for i, layout in enumerate(LAYOUTS)),
    *((FOUR[(i + 1 + i // 4) % 4], layout, "manual", 4) for i, layout in enumerate(LAYOUTS) if i % 2),
    *((FOUR[(i + 2) % 4], layout, "auto", 4 if i % 4 else 1) for i, layout in enumerate(LAYOUTS) if not i % 2),
    ("llama_gqa_options", "data2_fsdp2_tensor2", "manual", 1),
]
CASES = [
    pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.slow, id="-".join(map(str, case))) for case in EVERY
]


@pytest.mark.sample(9)
@pytest.mark.parametrize(("model", "layout", "lowering", "accumulation"), CASES)
def test_every_layout_is_equal_to_one_device(model, layout, lowering, accumulation):
    got = outcome(prepared(model, layout, lowering, accumulation))
    assert got.difference(on_one_device(model)) < 1e-10


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, marks=[] if model == list(MODELS)[i % 6] else pytest.mark.slow)
        for i, layout in enumerate(LAYOUTS)
        for model in MODELS
    ],
)
def test_the_initial_state_of_each_layout_is_that_of_one_device(model, layout):
    run = prepared(model, layout, "manual", 1)
    state = jax.device_get(run.compile_init(QUICK)())
    expected = first_state(run.run.model, run.run.lora, run.run.freeze)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True)
    assert max(abs(np.asarray(mine, float) - theirs).max() for mine, theirs in pairs) < 1e-10


def test_control_dropout_changes_the_numbers():
    """Otherwise equal masks would prove nothing."""
    with_dropout = on_one_device("gpt_dropout_remat")
    assert abs(with_dropout.losses - on_one_device("gpt_gqa_tied").losses).min() > 1e-6
