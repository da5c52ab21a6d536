"""`meshpar generate` and `meshpar.generate`, from the files of a run."""

from __future__ import annotations

import json

import pytest

import meshpar
from meshpar.experiment import actions
from meshpar.experiment.config import load

CONFIG = """\
model: {kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32, pad_vocab_to_multiple: 8}
data: {kind: text, path: corpus, batch_size: 8, seq_len: 16, held_out_fraction: 0.5}
optim: {kind: adamw, lr: 3e-1}
mesh: {data: 2, fsdp: 2, tensor: 2}
rules: [fsdp, megatron]
num_steps: 2
run_dir: run
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a config and the run that it made."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "corpus").mkdir()
    for name in "abcd":
        (folder / "corpus" / f"{name}.txt").write_text(f"{name} is a letter, as are others.\n" * 9)
    (folder / "config.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        actions.fit(load(folder / "config.yaml"), json=True)
    return folder


@pytest.fixture
def generate(trained, command, monkeypatch):
    """Runs the verb in that folder; returns its stdout and its stderr."""
    monkeypatch.chdir(trained)

    def call(*arguments: str) -> tuple[str, str]:
        code, out, err = command("generate", *arguments)
        assert code == 0
        return out, err

    return call


MORE = ["--max-tokens", "5"]


@pytest.fixture(scope="module")
def answers(trained):
    """The answers to two prompts on the run's own mesh."""
    return meshpar.generate(trained / "run", ["a is", "né"], max_tokens=5)


def test_the_terminal_shows_each_prompt_and_its_answer(generate, answers):
    out, err = generate("config.yaml", "--prompt", "a is", "--prompt", "né", *MORE)
    assert out == f"a is{answers.texts[0]}\n\nné{answers.texts[1]}\n"
    assert "tokens on data=2, fsdp=2, tensor=2: the first after" in err
    assert "cache 640 B a device" in err  # 2 x 1 layer x 4 rows x 10 slots x 2 heads x 8 x 4 bytes, over 8 devices


def test_a_run_on_another_mesh_gives_the_same_answers_as_json(generate, answers):
    other = ["mesh.data=1", "mesh.fsdp=1", "mesh.tensor=8", "rules=[megatron]", "rules.heads=[]", "rules.kv_heads=[]"]
    out, _ = generate("run", *other, "lowering=auto", "--prompt", "a is", "--prompt", "né", *MORE, "--json")
    plain = json.loads(out)
    assert plain["mesh"] == "tensor=8"
    assert plain["completions"] == answers.as_json()["completions"]
    assert [len(completion["tokens"]) for completion in plain["completions"]] == [5, 5]


def test_a_file_of_prompts_has_lines_of_text_or_of_json(generate, trained, answers):
    (trained / "lines.txt").write_text("a is\nné\n")
    (trained / "lines.jsonl").write_text('"a is"\n"n\\u00e9"\n')
    for name in ("lines.txt", "lines.jsonl"):
        out, _ = generate("run", "--prompts", name, *MORE)
        assert out == f"a is{answers.texts[0]}\n\nné{answers.texts[1]}\n"


def test_pieces_come_as_they_are_made_and_end_before_a_stop_string(trained, answers):
    text = answers.texts[0]
    pieces = []
    again = meshpar.generate(trained / "run", ["a is"], max_tokens=5, stop=[text[1:3]], show=pieces.append)
    assert again.completions[0].finish == "stop"
    assert again.texts[0] == text[: text.find(text[1:3])] == "".join(piece.text for piece in pieces)
    assert [piece.finish for piece in pieces][-2:] == [None, "stop"]


def test_a_prompt_may_be_token_ids(trained, answers):
    ids = [256, *b"a is"]
    assert meshpar.generate(trained / "run", [ids], max_tokens=5).completions[0].tokens == answers.completions[0].tokens
