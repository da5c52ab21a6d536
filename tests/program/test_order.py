"""Programs for CPU devices run their collectives in one order on every device."""

from __future__ import annotations

import pytest

from meshpar.inspection.program.text import Program
from meshpar.models import Llama
from meshpar.parallel.pipeline import execute
from tests.layouts import LAYOUTS
from tests.program.order import unordered
from tests.program.test_bytes import prepared

RING = ({"context": 4, "tensor": 2}, ["megatron_sp", "context"])
STAGES = ({"fsdp": 2, "pipe": 2, "tensor": 2}, ["fsdp", "megatron_sp", "pipeline"])
# With fewer than 128 features XLA chooses an order without the planted fault of the documents.
MODEL = Llama(num_layers=2, hidden_size=128, num_heads=8, intermediate_size=512, vocab_size=32, remat="none")
# Without ZeRO-1 and 2, which scatter the gradients of stacked layers in a loop for each parameter. No result orders
# these loops, and none of them was seen to run beside another.
PLAIN = {name: {"layout": name, "num_microbatches": 4} for name in LAYOUTS if name not in ("zero1", "zero2")}
PROGRAMS = PLAIN | {
    "ring": {"layout": RING, "num_microbatches": 4},
    "fsdp_ring": {"layout": ({"fsdp": 2, "context": 4}, ["fsdp", "context"]), "num_microbatches": 4},
    "gathered_rows": {"layout": RING, "num_microbatches": 4, "parallel": {"context": "all_gather"}},
    "pipeline": {"layout": STAGES, "parallel": {"pipeline": {"kind": "1f1b", "num_microbatches": 4}}},
}


def early(name):
    """Opcodes of the pairs that may run beside each other."""
    step = prepared(**PROGRAMS[name], model=MODEL).compile_step()
    return {(loop.opcode, one.opcode) for loop, one in unordered(Program(step.text))}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_collective_begins_beside_a_loop_that_communicates(name):
    assert early(name) == set()


def test_planted_conditions_that_wait_for_nothing_are_seen(monkeypatch):
    """This program hangs, see `tests/process/test_xla_order.py`."""
    monkeypatch.setattr(execute, "in_order", lambda number, results: number)
    assert ("conditional", "conditional") in early("pipeline")
