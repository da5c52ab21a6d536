"""In 8 bits every layout computes what one device computes in 8 bits."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import pytest

from meshpar.experiment.config import Precision
from meshpar.mesh.layout import MeshLayout
from meshpar.nn.attention import layer
from meshpar.parallel import quantized
from meshpar.sharding.rules import AxisRules
from tests.equivalence.conftest import Outcome, outcome, prepared
from tests.layouts import LAYOUTS

MODELS = ["llama", "llama_lora", "llama_frozen", "gpt_dropout_remat"]
KEY_HEADS_ON_ALL = ["llama_gqa_tied_dropout", "llama_gqa_options"]
"""Two key heads, which are whole where there are four devices for the heads."""
FORMATS = ["fp8", "int8"]
EVERY = [
    *product(MODELS, LAYOUTS, ["manual", "auto"], FORMATS, [1, 4]),
    *product(KEY_HEADS_ON_ALL, ["tensor4", "tensor4_sp"], ["manual", "auto"], FORMATS, [1, 4]),
    *product(["llama_experts", "llama_experts_capacity"], ["data2_fsdp2_tensor2"], ["manual"], FORMATS, [1, 4]),
]
# One recomputes the rounded inputs in the backward, one saves them.
SAMPLE = [
    ("llama", "data2_fsdp2_tensor2", "manual", "fp8", 1),
    ("llama_frozen", "data2_fsdp2_tensor2", "manual", "fp8", 1),
    ("llama", "data8", "auto", "fp8", 1),
    ("llama_gqa_options", "tensor4_sp", "manual", "fp8", 1),
]
CASES = [
    pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.slow, id="-".join(map(str, case))) for case in EVERY
]


def in_8_bits(number_format: Any, *run: Any, **settings: Any) -> Outcome:
    precision = Precision(params="float64", compute="float64", matmul=number_format)
    return outcome(prepared(*run, precision=precision, **settings))


@lru_cache
def on_one_device(number_format: str, model: str, num_microbatches: int) -> Outcome:
    """With as many microbatches: the scales of a weight's gradient depend on which tokens are summed."""
    return in_8_bits(number_format, model, None, "auto", num_microbatches)


@pytest.mark.parametrize(("model", "layout", "lowering", "number_format", "accumulation"), CASES)
def test_in_8_bits_it_equals_one_device(model, layout, lowering, number_format, accumulation):
    """Scales are global, so the same elements are rounded to the same numbers."""
    got = in_8_bits(number_format, model, layout, lowering, accumulation)
    assert got.difference(on_one_device(number_format, model, accumulation)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["1f1b", "zb_h1"])
def test_stages_in_8_bits_equal_one_device(kind, model, number_format):
    """ZB-H1 computes the gradients of weights apart from those of inputs."""
    got = in_8_bits(
        number_format, model, None, "manual", 1,
        mesh=MeshLayout(pipe=2, fsdp=2, tensor=2),
        rules=AxisRules(preset=("pipeline", "fsdp", "megatron_sp")),
        parallel={"pipeline": {"kind": kind, "num_microbatches": 4}},
    )  # fmt: skip
    assert got.difference(on_one_device(number_format, model, 4)) < 1e-10


def test_scales_of_a_shard_alone_are_seen(monkeypatch):
    """The planted fault: each device takes the largest element of its own shard."""
    largest = quantized.largest
    monkeypatch.setattr(quantized, "largest", lambda x, dims, axes: largest(x, dims, ()))
    got = in_8_bits("fp8", "llama", "data2_fsdp2_tensor2", "manual", 1)
    assert got.difference(on_one_device("fp8", "llama", 1)) > 1e-4


def test_planted_a_scale_of_a_part_of_a_gradient_is_seen(monkeypatch):
    """Each device projects the key heads of its own queries, as without 8 bits, and rounds its part of the gradient."""
    places_of = layer.key_places

    def places(*heads: Any) -> Any:
        found = places_of(*heads)
        return found and replace(found, in_8_bits=False)

    monkeypatch.setattr(layer, "key_places", places)
    got = in_8_bits("fp8", "llama_gqa_options", "tensor4_sp", "manual", 1)
    assert got.difference(on_one_device("fp8", "llama_gqa_options", 1)) > 1e-4
