"""On GPUs and TPUs the parameters of layer i + 1 are gathered while layer i computes, as the compiled program says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from meshpar.inspection.program.text import Program
from meshpar.parallel.context import IN_PLACE, prefetch_option
from tests.program.test_bytes import prepared

ROOT = Path(__file__).parents[2]
ASYNC = "AsyncCollective"
"""XLA:TPU starts and ends a gather by fusions with custom calls of this name."""


def gathers_in_loops(text):
    """(gathers in the bodies of loops, those that only the next iteration multiplies)."""
    program = Program(text)
    bodies = {one.word("body") for one in program.instructions() if one.opcode == "while"}
    found = [one for body in bodies for one in program.computation(body).values() if gathers(program, one)]
    return len(found), sum(not is_multiplied(program, one) for one in found)


def gathers(program, one):
    """Whether the instruction ends a gather."""
    if one.opcode == "fusion":
        parts = program.computation(one.word("calls")).values()
        ends = any(f'"{ASYNC}Done"' in part.rest for part in parts)
        return ends and any(part.opcode == "all-gather" for part in parts)
    return one.opcode in ("all-gather", "all-gather-done")


def is_multiplied(program, one):
    """Whether a product in the same iteration reads the result, or what is computed from it."""
    beside = program.computation(one.computation).values()
    found = {one.name}
    for other in beside:  # every instruction stands after its operands
        if found.intersection(other.operands):
            if multiplies(program, other):
                return True
            found.add(other.name)
    return False


def multiplies(program, one):
    if one.opcode == "fusion":
        return any(multiplies(program, part) for part in program.computation(one.word("calls")).values())
    is_kernel = one.opcode == "custom-call" and not re.search(f'"({ASYNC}|ConcatBitcast)', one.rest)
    return is_kernel or one.opcode in ("dot", "convolution")


BODY = """HloModule m

%body (p: (f32[2], f32[8])) -> (f32[2], f32[8]) {{
  %p = (f32[2], f32[8]) parameter(0)
  %shard = f32[2] get-tuple-element(%p), index=0
  %whole = f32[8] get-tuple-element(%p), index=1
  %start = (f32[2], f32[8]) all-gather-start(%shard), dimensions={{0}}
  %done = f32[8] all-gather-done(%start)
  %next = f32[8] bitcast(%done)
  %square = f32[8] add(%{used}, %{used})
  %product = f32[] dot(%square, %square), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
  ROOT %result = (f32[2], f32[8]) tuple(%shard, %{returned})
}}

ENTRY %main (p: (f32[2], f32[8])) -> (f32[2], f32[8]) {{
  %p = (f32[2], f32[8]) parameter(0)
  ROOT %loop = (f32[2], f32[8]) while(%p), condition=%body, body=%body
}}
"""


@pytest.mark.parametrize(
    ("used", "returned", "found"), [("whole", "next", (1, 1)), ("next", "whole", (1, 0)), ("next", "next", (1, 0))]
)
def test_a_gather_is_early_if_its_own_iteration_does_not_read_it(used, returned, found):
    assert gathers_in_loops(BODY.format(used=used, returned=returned)) == found


@pytest.mark.parametrize(
    ("overlap", "platform", "options"),
    [
        ("prefetch", "gpu", prefetch_option("gpu")),
        ("prefetch", "tpu", prefetch_option("tpu")),
        ("none", "gpu", {}),
    ],
)
def test_prefetch_is_an_option_of_xla(overlap, platform, options, monkeypatch):
    run = prepared("zero3", parallel={"fsdp": {"overlap": overlap}})
    monkeypatch.setattr("meshpar.parallel.context.platform_of", lambda mesh: platform)
    assert run.ctx.compiler_options == options


def test_the_installed_xla_knows_the_options_for_gpus():
    jax.jit(lambda x: x).lower(1.0).compile(compiler_options=prefetch_option("gpu") | IN_PLACE)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: x).lower(1.0).compile(compiler_options={"xla_gpu_enable_no_such_thing": True})


def test_on_cpus_prefetch_changes_nothing():
    plain = prepared("zero3")
    early = prepared("zero3", parallel={"fsdp": {"overlap": "prefetch"}})
    assert str(early._traced_step) == str(plain._traced_step)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100:1x8", "v5e:2x4"])
def test_the_compiled_step_gathers_the_next_layer_while_a_layer_computes(target):
    """Needs the extras gpu-target and tpu-target. A compile-only platform has to be chosen before JAX starts."""
    program = [sys.executable, "-m", "tests.program.prefetching", target]
    done = subprocess.run(program, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=900, check=True)
    early, late = (list(map(int, re.findall(r"\d+", line))) for line in done.stdout.splitlines())
    num_bytes, num, num_early = early
    assert num == num_early > 0
    assert late == [num_bytes, num, 0]
