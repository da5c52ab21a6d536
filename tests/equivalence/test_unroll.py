"""Layers without a loop, or several in an iteration, compute what the loop over single layers does."""

from __future__ import annotations

import jax
import pytest

from meshpar.models import Llama
from meshpar.nn.remat import Remat
from tests.equivalence.conftest import MODELS, SIZES, on_one_device, outcome, prepared
from tests.xla import DEFAULT_FUSIONS

CASES = [
    ("llama", "zero3", "manual", "all"),
    pytest.param("gpt_dropout_remat", "data2_fsdp2_tensor2", "manual", "all", marks=pytest.mark.slow),
    pytest.param("llama_gqa_options", "tensor4_sp", "auto", "all", marks=pytest.mark.slow),
    pytest.param("gpt_dropout_remat", "zero2", "manual", "all", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "layout", "lowering", "unroll"), CASES)
def test_unrolled_layers_are_equal_to_one_device(model, layout, lowering, unroll):
    run = prepared(model, layout, lowering, 2, fields={"unroll": unroll})
    assert outcome(run).difference(on_one_device(model)) < 1e-10
    assert run.traced_bytes == prepared(model, layout, lowering, 2).traced_bytes


@pytest.mark.parametrize("model", ["llama", "llama_gqa_options"])
def test_unrolled_layers_send_what_a_loop_of_them_does(model):
    """Parameters of single layers decide how products are sharded, as parameters in stacks do."""
    unrolled, looped = (prepared(model, "tensor4_sp", "manual", 2, fields={"unroll": n}) for n in ("all", 1))
    assert unrolled.traced_bytes == looped.traced_bytes


def compiled(unroll, num_layers, layout="zero3", **fields):
    run = prepared("llama", layout, "manual", 1, fields={"unroll": unroll, "num_layers": num_layers} | fields)
    return run.compile_step(DEFAULT_FUSIONS).compiled


def num_loops(unroll, num_layers=4):
    return compiled(unroll, num_layers).as_text().count(" while(")


@pytest.mark.slow
def test_unroll_all_removes_the_loops_and_a_number_shortens_them():
    assert num_loops("all") == 0 < num_loops(2) == num_loops(1)
    texts = [compiled(unroll, 4).as_text() for unroll in (1, 2)]
    assert texts[1].count("all-gather(") > texts[0].count("all-gather(")


def num_gathers(options=None):
    run = prepared("llama", "zero3", "manual", 1, fields={"unroll": "all", "num_layers": 4})
    return run.compile_step(options).text.count(" all-gather(")


def test_layers_without_a_loop_gather_again_in_the_backward():
    per_layer = 9
    assert num_gathers() == 2 * 4 * per_layer + 3  # embedding, norm and head are gathered once
    if jax.__version_info__ < (0, 11):  # later versions keep barriers without the option
        assert num_gathers({"xla_disable_hlo_passes": ""}) < num_gathers()


def large(num_layers=2, **fields):
    return Llama(**SIZES | {"num_layers": num_layers, "hidden_size": 128, "intermediate_size": 512}, **fields)


def test_auto_unrolls_only_few_large_layers_on_a_cpu():
    assert large().layers_of_an_iteration("cpu", False) == 2
    assert large().layers_of_an_iteration("cpu", True) == 1
    assert large(17).layers_of_an_iteration("cpu", False) == 1
    assert large().layers_of_an_iteration("gpu", False) == large().layers_of_an_iteration("tpu", False) == 1
    assert MODELS["llama"].layers_of_an_iteration("cpu", False) == 1
    assert large(unroll=8).layers_of_an_iteration("tpu", True) == 2
    assert large(unroll="all").layers_of_an_iteration("tpu", True) == 2


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("layout", "remat", "has_loop"), [("data8", "none", 0), ("zero3", "none", 0), ("data8", "full", 1)]
)
def test_auto_keeps_the_loop_where_the_backward_recomputes_activations(layout, remat, has_loop):
    sizes = {"hidden_size": 128, "intermediate_size": 512}
    text = compiled("auto", 2, layout, remat=Remat(policy=remat), **sizes).as_text()
    assert (" while(" in text) == has_loop
