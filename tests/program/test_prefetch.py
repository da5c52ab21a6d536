"""On GPUs the parameters of layer i + 1 are gathered while layer i computes, as the compiled program says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

from meshpar.inspection.program.text import Program
from meshpar.parallel.context import prefetch_option
from tests.program.test_bytes import prepared

ROOT = Path(__file__).parents[2]
VIEWS = ("bitcast", "copy", "get-tuple-element", "tuple")


def gathers_in_loops(text):
    """(gathers in the bodies of loops, those whose results only the next iteration reads)."""
    program = Program(text)
    bodies = {one.word("body") for one in program.instructions() if one.opcode == "while"}
    found = [one for body in bodies for one in program.computation(body).values() if one.opcode == "all-gather-done"]
    return len(found), sum(is_for_next_iteration(program.computation(one.computation), one) for one in found)


def is_for_next_iteration(computation, one):
    """Whether the result reaches only the tuple that the body returns."""
    readers = [other for other in computation.values() if one.name in other.operands]
    if not readers:
        return one.is_root
    return all(other.opcode in VIEWS and is_for_next_iteration(computation, other) for other in readers)


BODY = """HloModule m

%body (p: (f32[2], f32[8])) -> (f32[2], f32[8]) {{
  %p = (f32[2], f32[8]) parameter(0)
  %shard = f32[2] get-tuple-element(%p), index=0
  %whole = f32[8] get-tuple-element(%p), index=1
  %start = (f32[2], f32[8]) all-gather-start(%shard), dimensions={{0}}
  %done = f32[8] all-gather-done(%start)
  %next = f32[8] bitcast(%done)
  %square = f32[8] multiply(%{used}, %{used})
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
        ("prefetch", "gpu", prefetch_option()),
        ("prefetch", "tpu", {}),
        ("none", "gpu", {}),
    ],
)
def test_prefetch_is_an_option_of_xla_on_gpus(overlap, platform, options, monkeypatch):
    run = prepared("zero3", parallel={"fsdp": {"overlap": overlap}})
    monkeypatch.setattr("meshpar.parallel.context.platform_of", lambda mesh: platform)
    assert run.ctx.compiler_options == options


def test_the_installed_xla_knows_the_option():
    jax.jit(lambda x: x).lower(1.0).compile(compiler_options=prefetch_option())
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: x).lower(1.0).compile(compiler_options={"xla_gpu_enable_no_such_thing": True})


def test_on_cpus_prefetch_changes_nothing():
    plain = prepared("zero3")
    early = prepared("zero3", parallel={"fsdp": {"overlap": "prefetch"}})
    assert str(early._traced_step) == str(plain._traced_step)


@pytest.mark.slow
def test_the_compiled_step_gathers_the_next_layer_while_a_layer_computes():
    """Needs the extra gpu-target. A compile-only platform has to be chosen before JAX starts."""
    assert find_spec("jax_cuda12_plugin") or find_spec("jax_cuda13_plugin"), "gpu-target is not installed"
    program = [sys.executable, "-m", "tests.program.prefetching"]
    done = subprocess.run(program, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300, check=True)
    early, late = (re.fullmatch(r"equal bytes, (\d+) gathers, (\d+) early", line) for line in done.stdout.splitlines())
    assert early and late, done.stdout
    assert int(early[1]) == int(early[2]) == int(late[1]) > 0
    assert int(late[2]) == 0
