"""The errors of overlaps that have nothing to overlap, or that cannot work together with another setting."""

from __future__ import annotations

import pytest

from meshpar.data import Synthetic
from meshpar.errors import ConfigError
from meshpar.experiment.config import Run
from meshpar.experiment.prepare import prepare
from meshpar.mesh.layout import MeshLayout
from meshpar.models import Llama
from meshpar.optim import AdamW
from meshpar.sharding.rules import AxisRules

RING = {"overlap": "ring"}
BOTH = {"parallel": {"tensor": RING, "fsdp": RING}}
REFUSED = {
    "nothing to hide": (
        {"rules": ["zero2", "megatron"], **BOTH},
        """\
the parts of this config do not fit each other:
  parallel.tensor.overlap
    nothing to overlap: the rules do not shard residual_seq, so each layer has the whole sequence
    parallel.tensor.overlap=none, or the preset megatron_sp
  parallel.fsdp.overlap
    nothing to overlap: the rules do not gather weights in the layers, as ZeRO-3 does
    rules.zero=3""",
    ),
    "no weights in shards": (
        {"rules": ["replicated", "megatron"], "mesh": MeshLayout(data=2, tensor=2), "parallel": {"fsdp": RING}},
        """\
the parts of this config do not fit each other:
  parallel.fsdp.overlap
    nothing to overlap: the rules do not gather weights in the layers, as ZeRO-3 does
    parallel.fsdp.overlap=none, or the preset fsdp""",
    ),
    "GSPMD": (
        {"rules": ["fsdp", "megatron_sp"], "lowering": "auto", "parallel": {"tensor": RING}},
        """\
the parts of this config do not fit each other:
  lowering
    auto: GSPMD chooses the communication, so parallel.tensor.overlap would have no effect
    lowering=manual""",
    ),
    "both at once": (
        {"rules": ["fsdp", "megatron_sp"], **BOTH},
        """\
the parts of this config do not fit each other:
  parallel.fsdp.overlap
    parallel.tensor.overlap is on too, but only one operand of a product can travel in chunks
    parallel.tensor.overlap=none, or parallel.fsdp.overlap=none""",
    ),
    "a rounded scatter beside an overlap": (
        {"rules": ["fsdp"], "parallel": {"fsdp": RING, "gradient_reduction": {"within": "bf16"}}},
        """\
the parts of this config do not fit each other:
  parallel.gradient_reduction.within
    parallel.fsdp.overlap scatters gradients while it multiplies, and adds them unrounded
    parallel.gradient_reduction.within=exact, or parallel.fsdp.overlap=none""",
    ),
    "a rounded scatter in stages": (
        {
            "rules": ["fsdp", "pipeline"],
            "mesh": MeshLayout(pipe=2, fsdp=2),
            "parallel": {
                "pipeline": {"kind": "1f1b", "num_microbatches": 2},
                "gradient_reduction": {"within": "int8"},
            },
        },
        """\
the parts of this config do not fit each other:
  parallel.gradient_reduction.within
    a rounded reduce-scatter consists of permutes, which wait for all devices, also those in other stages
    parallel.gradient_reduction.within=exact, rules.zero=2, or parallel.pipeline=null""",
    ),
    "an overlap in stages": (
        {
            "rules": ["fsdp", "pipeline"],
            "mesh": MeshLayout(pipe=2, fsdp=2),
            "parallel": {"pipeline": {"kind": "1f1b", "num_microbatches": 2}, "fsdp": RING},
        },
        """\
the parts of this config do not fit each other:
  parallel.fsdp.overlap
    its rings are permutes, which wait for all devices of the mesh, and stages run different operations at a time
    no parallel.fsdp.overlap, or parallel.pipeline=null""",
    ),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_an_overlap_that_cannot_work_is_refused(settings, message):
    run = Run(
        model=Llama(num_layers=2, hidden_size=16, num_heads=4, intermediate_size=32, vocab_size=32),
        data=Synthetic(batch_size=8, seq_len=16, vocab_size=32),
        optim=AdamW(lr=1e-3),
        num_steps=2,
        run_dir="unused",
        **{"mesh": MeshLayout(fsdp=2, tensor=2), **settings, "rules": AxisRules(preset=tuple(settings["rules"]))},
    )
    with pytest.raises(ConfigError) as error:
        prepare(run, run.mesh.abstract())
    assert str(error.value) == message
