"""Bytes of the compiled manual step equal the closed forms, to the byte; GSPMD's do not."""

from __future__ import annotations

import math
from functools import lru_cache

import jax
import pytest

from meshpar.inspection.hlo import Collective, collectives, total_sent_bytes
from meshpar.mesh.layout import MeshLayout
from meshpar.models import Llama
from meshpar.parallel.traffic import parameter_bytes, scalar_bytes, share, tensor_bytes
from meshpar.run import Prepared, Run, prepare
from meshpar.sharding.rules import AxisRules
from meshpar.train.data import Synthetic
from meshpar.train.optim import AdamW
from meshpar.tree import flatten_with_paths
from tests.layouts import LAYOUTS

MODEL = Llama(num_layers=3, width=16, num_heads=4, mlp_width=32, vocab_size=32)
ROWS, SEQ = 32, 16


def prepared(layout: str, lowering: str = "manual", num_microbatches: int = 1) -> Prepared:
    sizes, presets = LAYOUTS[layout]
    return prepare(
        Run(
            model=MODEL,
            data=Synthetic(batch_size=ROWS, seq_len=SEQ, vocab_size=32),
            optim=AdamW(lr=1e-3),
            mesh=MeshLayout(**sizes),
            rules=AxisRules(preset=tuple(presets)),
            lowering=lowering,
            num_microbatches=num_microbatches,
            num_steps=10,
            run_dir="unused",
        )
    )


@lru_cache
def found_in(layout: str, lowering: str = "manual", num_microbatches: int = 1) -> list[Collective]:
    run = prepared(layout, lowering, num_microbatches)
    return collectives(run.compile_step().compiled.as_text(), run.mesh)


def closed_form(run: Prepared):
    rows = ROWS // math.prod(run.mesh.shape[axis] for axis in run.how.axes("batch"))
    sharded = run.placement.sharded
    parameters = parameter_bytes(sharded, run.how, run.run.num_microbatches)
    activations = tensor_bytes(run.how, MODEL.num_layers, rows, SEQ, MODEL.width, itemsize=4)
    return parameters + activations + scalar_bytes(sharded, run.how)


def parameter_size(run: Prepared, layers: bool) -> int:
    arrays = flatten_with_paths(run.specs).values()
    return sum(spec.num_bytes for spec in arrays if ("layers" in spec.dims) == layers)


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_manual_step_sends_its_closed_form(layout, num_microbatches):
    run = prepared(layout, "manual", num_microbatches)
    assert total_sent_bytes(found_in(layout, "manual", num_microbatches)) == closed_form(run)


def test_the_closed_forms_are_the_textbooks():
    """3(n-1)/n P for FSDP's layers, 2(n-1)/n P for the others, in numbers that no code of meshpar made."""
    inside, outside = (parameter_size(prepared("zero3"), layers) for layers in (True, False))
    sent = {name: parameter_bytes(prepared(name).placement.sharded, prepared(name).how) for name in LAYOUTS}
    assert sent["data8"] == sent["zero1"] == sent["zero2"] == 2 * share(8, inside + outside)
    assert sent["zero3"] == 3 * share(8, inside) + 2 * share(8, outside)
    assert sent["hsdp2x4"] == 3 * share(4, inside) + 2 * share(4, outside) + 2 * share(2, (inside + outside) // 4)


def test_tensor_parallelism_sends_eight_thirds_of_an_activation_a_layer_and_pass():
    """8(t-1)/t b s h for each layer, whatever becomes of the sequence."""
    with_sp, without = (tensor_bytes(prepared(name).how, 1, 16, SEQ, 16, 4) for name in ("tensor4_sp", "tensor4"))
    none = tensor_bytes(prepared("tensor4").how, 0, 16, SEQ, 16, 4)
    assert with_sp == without
    assert without - none == 8 * share(4, 16 * SEQ * 16 * 4)


def test_gspmd_fails_the_same_test():
    assert total_sent_bytes(found_in("zero3", "auto", 1)) > 1.2 * closed_form(prepared("zero3"))


@pytest.mark.parametrize("layout", ["data8", "zero1", "zero2", "hsdp2x4"])
def test_gradients_are_reduced_once_whatever_the_microbatches(layout):
    """ZeRO-3's own reduce-scatter stays in the layer; what remains, across replicas, comes once."""
    kinds = ["all_reduce"] if layout == "hsdp2x4" else ["all_reduce", "reduce_scatter"]

    def reductions(num_microbatches: int) -> int:
        return sum(c.times for c in found_in(layout, "manual", num_microbatches) if c.kind in kinds)

    assert reductions(1) == reductions(4)


def test_gspmd_reduces_gradients_in_every_microbatch():
    def reductions(num_microbatches: int) -> int:
        return sum(c.times for c in found_in("data8", "auto", num_microbatches) if c.kind == "all_reduce")

    assert reductions(4) > reductions(1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_optimizer_communicates_nothing_but_zero1s_gather(layout):
    """AdamW on sharded state is elementwise: every collective of the step stems from the manual region."""
    outside = [c for c in found_in(layout, "manual", 1) if "shard_map" not in c.op_name]
    assert {c.kind for c in outside} <= {"all_gather"}
    assert len(outside) == (len(jax.tree.leaves(prepared(layout).specs)) if layout == "zero1" else 0)
