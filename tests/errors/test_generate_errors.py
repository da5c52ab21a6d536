"""The errors of prompts, settings and models that cannot be generated from: exit code 2, and no traceback."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshpar.errors import ShardingError
from meshpar.sharding.rules import AxisRules
from tests.serving import paged

CONFIG = """\
model: {kind: gpt, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32, max_seq_len: 16}
data: {kind: text, path: corpus, batch_size: 8, seq_len: 16}
optim: {kind: adamw, lr: 1e-3}
mesh: {data: 8}
num_steps: 2
run_dir: run
"""
LONG = "0123456789abcdef"


@pytest.fixture
def meshpar(command, monkeypatch, tmp_path):
    """Runs the verb in a folder with CONFIG and an empty folder that is named like a checkpoint."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "run" / "checkpoints" / "2").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('"a"\n{"text": "b"}\n')
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        result = command("generate", *arguments)
        return result._replace(err=result.err.replace(f"{tmp_path}/", ""))

    return call


REFUSED = {
    "no prompt": (["config.yaml"], "meshpar: there is no prompt: use --prompt TEXT or --prompts FILE\n"),
    "no file of prompts": (
        ["config.yaml", "--prompts", "nothing.txt"],
        "meshpar: --prompts nothing.txt: cannot be read: No such file or directory\n",
    ),
    "a line that is no text": (
        ["config.yaml", "--prompts", "prompts.jsonl"],
        "meshpar: --prompts prompts.jsonl:2: is not a JSON string\n",
    ),
    "prompts and settings": (
        ["config.yaml", "--prompt", "", "--prompt", "0123456789", "--prompt", LONG, "--max-tokens", "7", "--stop", ""],
        """\
meshpar: these prompts cannot be answered:
  stop
    an empty text occurs everywhere
    leave it out
  prompt 1
    is empty
    write at least one character
  prompt 2
    11 tokens and 7 more do not fit model.max_seq_len = 16
    max_tokens=5
  prompt 3
    17 tokens and 7 more do not fit model.max_seq_len = 16
    a shorter prompt
""",
    ),
    "sampling": (
        ["config.yaml", "--prompt", "a", "--temperature", "-0.5", "--top-p", "1.5"],
        """\
meshpar: these settings of sampling are invalid:
  temperature
    -0.5 is not 0 or more
    0 selects the most probable token
  top_p
    1.5 is not a probability above 0
    1 for all tokens
""",
    ),
    "a tokenizer that does not fit": (
        ["config.yaml", "model.vocab_size=256", "--prompt", "a", "--max-tokens", "0"],
        """\
meshpar: these prompts cannot be answered:
  model.vocab_size
    the tokenizer has 257 ids, the model 256
    the tokenizer that the model was trained with
  max_tokens
    0 is not 1 or more
    1
""",
    ),
    "no checkpoint": (
        ["config.yaml", "run_dir=other", "--prompt", "a"],
        "meshpar: other does not exist; an untrained model cannot generate: meshpar train config.yaml\n",
    ),
    "no run": (["empty", "--prompt", "a"], "meshpar: empty is no checkpoint, and holds none\n"),
    "a model of the user's own": (
        ["config.yaml", "model={kind: import, target: my.model:build}", "--prompt", "a"],
        "meshpar: my.model:build: there is no my/model.py in the working directory, HERE\n",
    ),
    "a misspelt key": (
        ["config.yaml", "mesh.tenser=2", "--prompt", "a"],
        """\
meshpar: 1 problem in config.yaml:
  mesh.tenser (command line)
    unknown key
    did you mean mesh.tensor?
""",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_do_not_fit_are_refused_in_these_words(case, meshpar):
    arguments, text = REFUSED[case]
    assert meshpar(*arguments) == (2, "", text.replace("HERE", str(Path.cwd())))


@pytest.mark.parametrize("dim", ["seq", "layers"])
def test_rules_that_would_shard_one_token_are_refused(dim):
    ctx = paged("llama", "data2", "manual").ctx
    with pytest.raises(ShardingError) as error:
        replace(paged("llama", "data2", "manual"), ctx=replace(ctx, rules=AxisRules(batch=(), **{dim: ("data",)})))
    assert f"rules.{dim}\n    one token cannot be divided over data\n    mesh.data=1" in str(error.value)
