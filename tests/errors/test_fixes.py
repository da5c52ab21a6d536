"""Every fix that an error proposes as `key=value` is applied, and must solve the problem that it was proposed for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from meshpar.errors import MeshparError
from meshpar.experiment.config import load
from meshpar.experiment.prepare import Prepared, prepare

CONFIG = """\
model: {kind: llama, num_layers: 4, hidden_size: 32, num_heads: 8, num_kv_heads: 2, intermediate_size: 48,
  vocab_size: 96}
data: {kind: synthetic, vocab_size: 96, batch_size: 24, seq_len: 16}
optim: {kind: adamw, lr: 1e-3}
mesh: {fsdp: 2, tensor: 2}
rules: [fsdp, megatron]
num_steps: 4
run_dir: runs/test
"""
PIPE_MESH = ["mesh=null", "mesh={pipe: 2}"]
PIPE = [*PIPE_MESH, "rules=pipeline"]
ONE_F_ONE_B = "parallel.pipeline={kind: 1f1b, num_microbatches: 4}"
WSD = "optim.schedule={kind: wsd, warmup_steps: 3, decay_fraction: 0.5}"
GPT = "{kind: gpt, num_layers: 2, hidden_size: 32, num_heads: 8, intermediate_size: 48, vocab_size: 96, max_seq_len: 8}"

MISFITS = {
    "kv_heads over tensor": ["mesh.tensor=4"],
    "heads between two sizes": ["mesh.tensor=3", "model.num_heads=16", "model.num_kv_heads=16"],
    "a dim over two axes": ["mesh.expert=5", "rules.mlp=[tensor, expert]"],
    "a prime dim": ["model.intermediate_size=31"],
    "an axis that no rule uses": ["mesh.context=2"],
    "no rules": ["mesh=null", "mesh={data: 2}", "rules=[]"],
    "no rules on one device": ["mesh=null", "mesh={data: 1}", "rules=[]"],
    "a dim without a rule": [
        "rules={batch: [fsdp], layers: [], heads: [], kv_heads: [], head_dim: [], mlp: [], embed: [tensor, fsdp]}",
        "lowering=auto",
    ],
    "two dims over one axis": ["rules.head_dim=[fsdp]"],
    "chunks of a row": ["rules.seq=[tensor]", "data.seq_len=126"],
    "seq over the batch": ["rules.seq=[fsdp]"],
    "stages under GSPMD": [*PIPE, "lowering=auto"],
    "1 layer on 2 stages": [*PIPE, ONE_F_ONE_B, "model.num_layers=1"],
    "1 padded layer on 2 stages": [*PIPE, ONE_F_ONE_B, "model.num_layers=1", "model.pad_layers_to_multiple=3"],
    "3 layers on 2 stages": [*PIPE, ONE_F_ONE_B, "model.num_layers=3"],
    "3 layers with zbv on 2": [*PIPE, "parallel.pipeline={kind: zbv, num_microbatches: 4}", "model.num_layers=3"],
    "a cut of other layers": [*PIPE, "parallel.pipeline={kind: 1f1b, num_microbatches: 4, cut: [1, 2]}"],
    "microbatches in groups": [*PIPE, "parallel.pipeline={kind: interleaved, num_microbatches: 3}"],
    "stages in no order": [*PIPE],
    "a pipeline under GSPMD": ["parallel.pipeline={kind: 1f1b, num_microbatches: 4}", "lowering=auto"],
    "a reduction under GSPMD": ["lowering=auto", "parallel.gradient_reduction={}"],
    "an overlap under GSPMD": ["rules=[fsdp, megatron_sp]", "lowering=auto", "parallel.tensor.overlap=ring"],
    "nothing to overlap": ["parallel.tensor.overlap=ring"],
    "no weights to overlap": ["mesh=null", "mesh={data: 2}", "rules=replicated", "parallel.fsdp.overlap=ring"],
    "weights that are gathered once": ["rules=[zero2, megatron]", "parallel.fsdp.overlap=ring"],
    "two overlaps": ["rules=[fsdp, megatron_sp]", "parallel.fsdp.overlap=ring", "parallel.tensor.overlap=ring"],
    "token ids": ["model.vocab_size=64"],
    "positions": [f"model={GPT}"],
    "a warm-up longer than the run": ["optim.schedule={kind: linear, warmup_steps: 9}"],
    "a decay that grows with the run": [WSD],
    "a decay of steps": ["optim.schedule={kind: wsd, warmup_steps: 3, decay_steps: 3}"],
    "8 bits in chunks": ["rules=[fsdp, megatron_sp]", "parallel.tensor.overlap=ring", "precision.matmul=fp8"],
    "8 bits of whole key heads": ["mesh.tensor=4", "rules.kv_heads=[]", "precision.matmul=int8"],
    "64 bits": ["precision={params: float64, master: float64}"],
    "an evaluation to judge by": ["checkpoints={every: 2, keep_best: 1}"],
}  # fmt: skip
NEW_PROBLEMS = {
    # Problems that appear after a fix, which solves one of several.
    "a dim over two axes": "no rule uses this axis",
    "stages under GSPMD": "no schedule orders their work|no rule uses this axis|cannot be sharded",
}
PROPOSAL = re.compile(r"[a-z_]+(?:\.[a-z_]+)*=(?:\[[^\]]*\]|\{[^}]*\}|[^\s,;]+)")


def problems(text: str) -> list[tuple[str, str, str]]:
    """(where, what, fix) of each problem in the text of an error; a fix may be empty."""
    blocks = re.findall(r"^  (\S.*)\n((?:    .*\n?)+)", text, re.MULTILINE)
    split = [(where, [line.strip() for line in body.splitlines()]) for where, body in blocks]
    return [(where, lines[0], lines[1] if len(lines) > 1 else "") for where, lines in split]


def prepared(folder: Path, overrides: list[str]) -> Prepared:
    run = load(folder / "config.yaml", overrides)
    return prepare(run, run.mesh.abstract())


def traced(folder: Path, overrides: list[str]) -> None:
    """Traces a step without compiling it."""
    found = prepared(folder, overrides)
    jax.eval_shape(found.step, found.placement.structs, found.batch)


def remaining_error(check: Callable[..., object], folder: Path, overrides: list[str]) -> str:
    """The text of the error, if there is one."""
    try:
        check(folder, overrides)
    except MeshparError as error:
        return str(error)
    return ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def test_control_the_config_without_overrides_fits(folder):
    traced(folder, [])


@pytest.mark.sample(20)
@pytest.mark.parametrize("check", [prepared, pytest.param(traced, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", MISFITS)
def test_each_proposed_fix_solves_its_problem(folder, case, check):
    with pytest.raises(MeshparError) as refused:
        prepared(folder, MISFITS[case])
    found = problems(str(refused.value))
    proposals = [(where, what, fix) for where, what, text in found for fix in PROPOSAL.findall(text)]
    before = [(where, what) for where, what, _ in found]
    assert proposals, f"no fix is proposed:\n{refused.value}"
    for where, what, fix in dict.fromkeys(proposals):
        error = remaining_error(check, folder, [*MISFITS[case], fix])
        remaining = [(where, what) for where, what, _ in problems(error)]
        assert (where, what) not in remaining, f"{fix} does not solve {where}:\n{error}"
        new = [what for where, what in remaining if (where, what) not in before]
        assert all(re.search(NEW_PROBLEMS.get(case, "^$"), what) for what in new), f"{fix} makes:\n{error}"
