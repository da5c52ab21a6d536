"""A user's own rules, if they are accepted, compute what one device computes."""

from __future__ import annotations

import pytest

from meshpar.mesh.layout import MeshLayout
from meshpar.sharding.rules import AxisRules
from tests.equivalence.conftest import on_one_device, outcome, prepared

pytestmark = pytest.mark.matrix

BOTH = ("context", "tensor")
TENSOR = ("tensor",)
CONTEXT = ("context",)
MANUAL = {
    "a sequence over more axes than heads": {"residual_seq": BOTH, "heads": TENSOR, "mlp": CONTEXT, "vocab": BOTH},
    "a sequence over one axis of heads": {"residual_seq": CONTEXT, "heads": BOTH, "kv_heads": BOTH, "vocab": CONTEXT},
    "a sequence in the other order": {"residual_seq": BOTH[::-1], "heads": CONTEXT, "mlp": TENSOR, "vocab": BOTH},
    "heads alone": {"heads": BOTH, "vocab": TENSOR},
    "head_dim in storage": {"head_dim": ("fsdp",), "mlp": ("tensor", "fsdp"), "vocab": CONTEXT},
}  # fmt: skip
AUTO = {
    "a sequence that attention gathers": {"seq": CONTEXT, "mlp": TENSOR},
    "head_dim": {"head_dim": TENSOR, "layers": CONTEXT},
}
SAMPLE = ("a sequence over more axes than heads", "a sequence that attention gathers")
CASES = [
    pytest.param(lowering, rules, id=f"{lowering}: {name}", marks=[] if name in SAMPLE else pytest.mark.slow)
    for lowering, table in [("manual", MANUAL), ("auto", AUTO)]
    for name, rules in table.items()
]


@pytest.mark.parametrize(("lowering", "rules"), CASES)
def test_rules_that_are_accepted_compute_what_one_device_computes(lowering, rules):
    mesh = MeshLayout(fsdp=2, context=2, tensor=2)
    got = outcome(prepared("llama", None, lowering, 1, mesh=mesh, rules=AxisRules(preset=("replicated",), **rules)))
    assert got.difference(on_one_device("llama")) < 1e-10


OF_EXPERTS = [
    ("llama_experts", {"experts": TENSOR, "router": CONTEXT}),
    ("llama_experts_capacity", {"router": TENSOR, "embed": CONTEXT}),
    ("llama_experts", {"embed": TENSOR, "mlp": CONTEXT}),
    ("llama_experts_capacity", {"experts": BOTH, "heads": TENSOR, "kv_heads": TENSOR}),
]


@pytest.mark.parametrize(
    ("model", "rules"), [pytest.param(*case, marks=pytest.mark.slow if i else []) for i, case in enumerate(OF_EXPERTS)]
)
def test_experts_that_axes_without_tokens_shard_are_gathered_and_equal_to_one_device(model, rules):
    mesh = MeshLayout(fsdp=2, context=2, tensor=2)
    got = outcome(prepared(model, None, "manual", 1, mesh=mesh, rules=AxisRules(preset=("replicated",), **rules)))
    assert got.difference(on_one_device(model)) < 1e-10
