"""What a user reads who asks for an overlap where there is nothing to hide, or too much."""

from __future__ import annotations

import pytest

from meshpar.errors import ConfigError
from meshpar.experiment.config import Run
from meshpar.experiment.prepare import prepare
from meshpar.mesh.layout import MeshLayout
from meshpar.models import Llama
from meshpar.optim import AdamW
from meshpar.sharding.rules import AxisRules
from meshpar.train.data import Synthetic

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
    auto: GSPMD chooses the communication, so overlap has no effect
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
}


@pytest.mark.parametrize(("settings", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_an_overlap_that_cannot_be_is_refused(settings, said):
    rules = AxisRules(preset=tuple(settings.pop("rules")))
    run = Run(
        model=Llama(num_layers=2, hidden_size=16, num_heads=4, intermediate_size=32, vocab_size=32),
        data=Synthetic(batch_size=8, seq_len=16, vocab_size=32),
        optim=AdamW(lr=1e-3),
        mesh=settings.pop("mesh", MeshLayout(fsdp=2, tensor=2)),
        rules=rules,
        num_steps=2,
        run_dir="unused",
        **settings,
    )
    with pytest.raises(ConfigError) as error:
        prepare(run, run.mesh.abstract())
    assert str(error.value) == said
