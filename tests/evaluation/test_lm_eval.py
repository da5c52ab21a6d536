"""lm-eval's numbers by our engine, in process and by the server, beside those of its own `hf` on the same weights.

They need the extra `eval`, whose installation takes half a minute, so they are slow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshpar.evaluation.tasks import read_tasks
from tests.chats import write_tokenizer
from tests.command import exit_code
from tests.evaluation.tasks import TASKS, write_tasks
from tests.interop.pretrained import SIZES, saved_with
from tests.interop.test_chat_journey import call

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of lm-eval and the libraries that it imports

MESH = ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "rules=[fsdp,megatron]"]
LONGEST = 48
CONFIG: dict[str, Any] = {
    **SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "bos_token_id": 0,
    "eos_token_id": 2, "tie_word_embeddings": True, "rope_theta": 1e4, "max_position_embeddings": 128,
}  # fmt: skip
KINDS = {
    "loglikelihood": [("The capital of Peru is", " Lima"), ("", "Rome"), ("x " * 60, "y"), ("<|im_end|>A ", "b")],
    "loglikelihood_rolling": [("Havana, naïve. " * 12,), ("a",)],
    "generate_until": [
        ("It is", {"until": ["a", "\n"], "max_gen_toks": 12}),
        ("x " * 60, {"until": [], "max_gen_toks": 8}),
    ],
}


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Any:
    """A folder with the model `hf` and the tasks `tasks`."""
    folder = tmp_path_factory.mktemp("evaluation")
    before = Path.cwd()
    os.chdir(folder)
    saved_with(CONFIG, Path("hf"))
    write_tokenizer(Path("hf"))
    write_tasks(Path("tasks"))
    yield folder
    os.chdir(before)


def theirs(**options: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    options = {
        "pretrained": "hf",
        "dtype": "float32",
        "device": "cpu",
        "max_length": LONGEST,
        "batch_size": 1,
    } | options
    return HFLM(**options)


def ours() -> Any:
    from meshpar.evaluation.model import LENGTHS, EngineModel
    from meshpar.serve.open_engine import open_engine
    from meshpar.serve.source import open_source

    source = open_source(Path("hf"), MESH)
    return EngineModel(source, open_engine(source, slots=4, max_len=LONGEST + LENGTHS, page_size=8, chunk=16))


def answers(model: Any, kind: str) -> list[Any]:
    from lm_eval.api.instance import Instance

    asked = [Instance(kind, {}, args, i) for i, args in enumerate(KINDS[kind])]
    return getattr(model, kind)(asked)


def check_equal(mine: Callable[[str], list[Any]]) -> None:
    """Compares each kind of request with lm-eval's own backend."""
    reference = theirs()
    for kind in KINDS:
        found, expected = mine(kind), answers(reference, kind)
        if kind == "generate_until":
            assert found == expected
            assert any(expected)
        else:
            values = [[one[0] if isinstance(one, tuple) else one for one in each] for each in (found, expected)]
            np.testing.assert_allclose(*values, atol=1e-4, rtol=0)
            assert [one[1:] for one in found if isinstance(one, tuple)] == [
                x[1:] for x in expected if isinstance(x, tuple)
            ]


def test_requests_equal_those_of_transformers(here):
    model = ours()
    check_equal(lambda kind: answers(model, kind))


def test_tasks_have_the_numbers_of_transformers(here):
    from lm_eval.evaluator import evaluate

    from meshpar.evaluation.evaluate import _opened

    said = call("evaluate", "hf", "mesh.data=8", "--tasks", "tasks", "--max-len", LONGEST, "--json", "--no-cache")
    found = {
        (one["task"], one["metric"]): one["value"] for one in json.loads(said.out[said.out.index("{") :])["scores"]
    }
    tasks = {one.name: _opened(one, None) for one in read_tasks(Path("tasks"))}
    expected = evaluate(theirs(), {"tasks": tasks}, bootstrap_iters=0, log_samples=False)["results"]
    assert set(expected) == set(TASKS)
    for (task, metric), value in found.items():
        theirs_value = next(v for key, v in expected[task].items() if key.split(",")[0] == metric)
        assert abs(value - theirs_value) < 1e-4 * max(1, abs(theirs_value)), (task, metric, value, theirs_value)
    assert len(found) == 6


def test_requests_to_a_server_equal_those_of_transformers(here):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    command = [sys.executable, "-m", "meshpar", "serve", "hf", "--port=0", "--slots=4", f"--max-len={LONGEST + 2}"]
    process = subprocess.Popen(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, stderr=subprocess.PIPE, text=True)
    try:
        lines = [process.stderr.readline() for _ in range(2)]
        address = {"base_url": f"{lines[1].split()[-1]}/v1/completions", "model": "hf", "tokenizer": "hf"}
        # It counts the token that the server samples, and of a row to score also the last one.
        more = {"loglikelihood": 2, "loglikelihood_rolling": 2, "generate_until": 1}
        check_equal(lambda kind: answers(LocalCompletionsAPI(**address, max_length=LONGEST + more[kind]), kind))
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_template_runs_in_a_sandbox(here, tmp_path):
    tasks = write_tasks(tmp_path)
    text = (tasks / "written.yaml").read_text().replace("{{country}}", "{{country.__class__.__mro__}}")
    (tasks / "written.yaml").write_text(text)
    assert exit_code("evaluate", "hf", "mesh.data=8", "--tasks", tasks / "written.yaml", "--no-cache") == 2


def test_a_wrong_number_is_seen(here, monkeypatch):
    """Negative control: scores that are one token late are other numbers."""
    model = ours()
    answer = type(model)._loglikelihood_tokens
    shifted = lambda self, requests, **_: answer(self, [(a, b + c[:1], c[1:] or c) for a, b, c in requests])
    monkeypatch.setattr(type(model), "_loglikelihood_tokens", shifted)
    with pytest.raises(AssertionError):
        check_equal(lambda kind: answers(model, kind))
