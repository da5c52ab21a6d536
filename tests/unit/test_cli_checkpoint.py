"""`meshpar checkpoint`, and how `meshpar train` reads checkpoints, on eight devices in this process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshpar.checkpoint.lock import hold
from meshpar.errors import DamagedWarning
from tests.command import Said, exit_code

CONFIG = """\
model: {kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 16, vocab_size: 32}
data: {kind: synthetic, vocab_size: 32, batch_size: 8, seq_len: 8, num_documents: 60, document_len: 50}
optim: {kind: adamw, lr: 1e-2}
mesh: {data: 8}
num_steps: 3
eval_every: 1
checkpoints: {every: 1, keep: 3, keep_best: 1}
run_dir: run
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of three steps."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "config.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert exit_code("train", "config.yaml", "--json") == 0
    return folder


@pytest.fixture(autouse=True)
def _within(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)


@pytest.fixture
def out(command: Callable[..., Said]) -> Any:
    def out(*arguments: str) -> str:
        result = command(*arguments)
        assert result.code == 0
        return result.out

    return out


@pytest.fixture
def refused(command: Callable[..., Said]) -> Any:
    def refused(*arguments: str) -> str:
        result = command(*arguments)
        assert result.code == 2
        return result.err

    return refused


def test_ls_marks_the_best_and_the_damaged(out: Any, folder: Path):
    rows = json.loads(out("checkpoint", "ls", "run", "--json"))
    losses = [row["value"] for row in rows]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["best"] for row in rows] == [loss == min(losses) for loss in losses]
    written = [path for path in (folder / "run" / "checkpoints" / "3").rglob("*") if path.is_file()]
    sums = next(path for path in written if path.name == "sha256.json")
    assert rows[2]["size_bytes"] == sum(path.stat().st_size for path in written) - sums.stat().st_size
    meta = folder / "run" / "checkpoints" / "2" / "meta.json"
    text = meta.read_text()
    try:
        meta.write_text(text + " ")
        assert [line.split()[:2] for line in out("checkpoint", "ls", "run").splitlines()[2:3]] == [["2", "damaged"]]
    finally:
        meta.write_text(text)


def test_show_prints_the_state_of_a_checkpoint(out: Any):
    lines = out("checkpoint", "show", "run").splitlines()
    assert "data: next batch 3, 24 rows read, seed 0" in lines
    assert "random: seed 0, threefry2x32, step 3 folded in" in lines
    assert '  optim.kind: "adamw"' in lines
    description = json.loads(out("checkpoint", "show", "run/checkpoints/2", "--json"))
    assert description["step"] == 2
    head = {"dtype": "float32", "shape": [16, 32], "dims": ["embed", "vocab"], "bytes": 4 * 16 * 32}
    assert description["arrays"]["opt_state.0.mu.head"] == description["arrays"]["params.head"] == head


def test_diff_lists_the_arrays_that_differ(out: Any):
    same = json.loads(out("checkpoint", "diff", "run", "run", "--json"))
    assert (same["arrays"], same["config"]) == ([], {})
    report = json.loads(out("checkpoint", "diff", "run/checkpoints/1", "run", "--json"))
    step = next(array for array in report["arrays"] if array["path"] == "step")
    assert (step["num_different"], step["largest"], step["relative"]) == (1, 2.0, 2.0)
    assert report["num_same"] == 1  # nothing was skipped
    assert "  step" in out("checkpoint", "diff", "run/checkpoints/1", "run")


@pytest.mark.parametrize("verb", ["ls", "show"])
def test_a_folder_that_is_no_checkpoint_is_refused(verb: str, refused: Any, folder: Path):
    assert refused("checkpoint", verb, ".") == f"meshpar: {folder} is no checkpoint, and holds none\n"


def test_resuming_with_another_optimizer_is_refused(refused: Any, folder: Path):
    lines = refused("train", "config.yaml", "optim.kind=lion", "optim.lr=1e-2").splitlines()
    assert lines[0] == (
        f"meshpar: {folder}/run/checkpoints/3 holds another optimizer: 12 arrays differ; "
        "run_dir=... makes this a run of its own:"
    )
    assert lines[1:3] == ["  optim.kind", "    adamw in the checkpoint, lion in this run"]
    assert lines[7:9] == [
        "  opt_state.0.nu.blocks.attn.k.kernel",
        "    float32[1, 16, 2, 8] in the checkpoint, unknown to this run",
    ]


def test_resuming_with_another_master_precision_is_refused(refused: Any):
    lines = refused("train", "config.yaml", "precision.master=float32").splitlines()
    assert "holds another optimizer" in lines[0]
    assert lines[1:3] == ["  precision.master", "    None in the checkpoint, float32 in this run"]


def test_a_model_with_another_vocabulary_excludes_the_arrays_that_it_initializes(refused: Any, out: Any, folder: Path):
    """The embedding and the head are initialized, the rest is restored."""
    words = ["train", "config.yaml", "run_dir=tuned", "init.from_checkpoint=run", "model.vocab_size=40", "--json"]
    lines = refused(*words).splitlines()
    assert lines[0].endswith("2 arrays differ; exclude=... leaves out what this run initializes itself:")
    assert lines[1:4] == ["  model.vocab_size", "    32 in the checkpoint, 40 in this run", "  params.embedding"]

    records = [json.loads(line) for line in out(*words, "init.exclude=[params.head,params.embedding]").splitlines()]
    restored = records[0]
    assert (restored["kind"], restored["step"]) == ("restored", 0)
    assert restored["source"] == f"{folder}/run/checkpoints/3"
    assert (
        "params.blocks.mlp.up.kernel" in restored["restored"]
        and "params.head" in restored["initialized"]
        and "step" in restored["ignored"]
    )
    assert restored["changed"]["model.vocab_size"] == [32, 40]
    assert [record["step"] for record in records if record["kind"] == "train"][:1] == [1]


def test_a_glob_that_matches_nothing_is_refused_with_the_nearest_match(refused: Any, folder: Path):
    lines = refused("train", "config.yaml", "run_dir=other", "init.from_checkpoint=run", "init.include=[parms.**]")
    assert lines.splitlines()[1:] == [
        "  include: parms.**",
        "    matches no array of the checkpoint, and none of the run",
        "    did you mean params.**?",
    ]


def test_keep_best_needs_an_evaluation_of_every_checkpoint(refused: Any):
    lines = refused("train", "config.yaml", "eval_every=2", "checkpoints.every=3", "num_steps=9", "run_dir=other")
    assert lines.splitlines()[1:] == [
        "  checkpoints.keep_best",
        "    a checkpoint is saved every 3 steps, and the evaluation that ranks it runs only every 2 steps",
        "    eval_every=3",
    ]


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(out: Any, refused: Any, folder: Path):
    shutil.copytree("run", "cut")
    (folder / "cut" / "checkpoints" / "3" / "sha256.json").write_text("")  # as a power cut leaves it
    with pytest.warns(DamagedWarning, match="cut/checkpoints/2 is used instead"):
        records = [json.loads(line) for line in out("train", "config.yaml", "run_dir=cut", "--json").splitlines()]
    assert [(record["kind"], record["step"]) for record in records[:4]] == [
        ("damaged", 2), ("restored", 2), ("run", 2), ("train", 3)
    ]  # fmt: skip
    assert records[0]["folder"] == f"{folder}/cut/checkpoints/3"
    assert records[0]["why"].endswith("/3/sha256.json\n    is damaged, so no file can be verified")
    assert {"2", "3", "3.damaged"} <= {path.name for path in (folder / "cut" / "checkpoints").iterdir()}
    losses = [
        {record["loss"] for record in map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
         if record["kind"] == "train" and record["step"] == 3}
        for run in ("run", "cut")
    ]  # fmt: skip
    assert losses[0] == losses[1]
    assert "holds no config" not in out("checkpoint", "verify", "cut")


def test_init_and_generate_use_the_checkpoint_before_a_damaged_one_and_say_so(out: Any, folder: Path):
    shutil.copytree("run", "source")
    chunk = folder / "source" / "checkpoints" / "3" / "state" / "params.head" / "0.0"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    text = "source/checkpoints/3 is damaged"
    words = ["train", "config.yaml", "run_dir=begun", "init.from_checkpoint=source", "num_steps=1", "--json"]
    with pytest.warns(DamagedWarning, match=text):
        records = [json.loads(line) for line in out(*words).splitlines()]
    assert records[0]["source"] == f"{folder}/source/checkpoints/2"
    with pytest.warns(DamagedWarning, match=text):
        out("generate", "source", "--prompt", "5 6", "--max-tokens", "1")


def test_a_folder_with_the_number_of_another_step_is_refused_before_training(refused: Any, folder: Path):
    shutil.copytree("run", "renamed")
    (folder / "renamed" / "checkpoints" / "3").rename(folder / "renamed" / "checkpoints" / "5")
    parent = f"{folder}/renamed/checkpoints"
    message = f"meshpar: {parent}/5 holds step 3: rename it to {parent}/3, or move it away\n"
    assert refused("train", "config.yaml", "run_dir=renamed", "num_steps=7") == message


def test_a_second_run_is_told_who_holds_the_run_directory(refused: Any, folder: Path):
    records = (folder / "run" / "metrics.jsonl").read_text()
    with hold(folder / "run"):
        message = refused("train", "config.yaml", "num_steps=5")
    assert message.startswith(f"meshpar: run_dir: run is in use by process {os.getpid()} on ")
    assert message.count("\n") == 1
    assert (folder / "run" / "metrics.jsonl").read_text() == records
    assert not (folder / "run" / ".lock").exists()
