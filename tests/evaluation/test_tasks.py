"""What is refused in the files of tasks, without lm-eval: code, files elsewhere, patterns that never end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from meshpar.errors import ConfigError
from meshpar.evaluation.patterns import Pattern
from meshpar.evaluation.tasks import read_tasks
from tests.command import exit_code
from tests.evaluation.tasks import DOCUMENTS, TASKS, write_tasks

REFUSED = {
    "process_docs: !function utils.process_docs": [
        "bad.yaml:6",
        "the tag !function is refused",
        "as a template in Jinja",
    ],
    "class: {}": ["class", "is Python, and a task holds only text"],
    "process_results: os.system": ["process_results", "is Python"],
    "custom_dataset: os.system": ["custom_dataset", "is Python"],
    "unsafe_code: true": ["unsafe_code", "is Python"],
    "metric_list: [{metric: f1, hf_evaluate: true}]": ["hf_evaluate", "would load Python from a hub"],
    "filter_list: [{name: x, filter: [{function: custom, filter_fn: x}]}]": ["custom", "is no filter of texts"],
    "filter_list: [{name: x, filter: [{function: regx}]}]": ["did you mean regex?"],
    "doc_to_txt: x": ["doc_to_txt", "is no key of a task", "did you mean doc_to_text?"],
    "output_type: generate": ["output_type = generate", "generate_until"],
    "validation_split: dev": ["validation_split = dev", "has no documents", "one of test"],
    "include: ../other.yaml": ["include", "is not supported"],
    "include: /etc/passwd": ["include", "is not supported"],
}


@pytest.fixture
def folder(tmp_path) -> Path:
    write_tasks(tmp_path)
    for name in TASKS:
        (tmp_path / f"{name}.yaml").rename(tmp_path / f"{name}.txt")
    return tmp_path


def refusal(folder: Path, text: str) -> str:
    (folder / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError) as found:
        read_tasks(folder)
    return str(found.value)


@pytest.mark.parametrize("line", REFUSED)
def test_a_task_file_with_code_or_mistakes_is_refused(line, folder):
    text = f"task: bad\n{DOCUMENTS}doc_to_text: x\n{line}\n"
    (folder / "bad.yaml").write_text(text.replace(line, ""))
    assert [task.name for task in read_tasks(folder)] == ["bad"], "without the line it is read"
    message = refusal(folder, text)
    assert all(part in message for part in REFUSED[line]), message


def test_documents_are_local_files_beside_the_task(folder):
    for name, what in {"../x.jsonl": "is outside of the task's folder", "y.jsonl": "there is no such file"}.items():
        assert what in refusal(folder, "task: bad\n" + DOCUMENTS.replace("cities.jsonl", name))
    assert "documents are local files" in refusal(folder, "task: bad\ndataset_path: openai/gsm8k\n")


def test_all_problems_are_reported_at_once(folder):
    message = refusal(folder, "dataset_path: json\nclas: 3\n")
    assert all(part in message for part in ("task", "clas", "dataset_kwargs")), message


def test_the_verb_refuses_such_a_file(folder, capsys):
    (folder / "bad.yaml").write_text(f"task: bad\n{DOCUMENTS}doc_to_text: !function utils.f\n")
    assert exit_code("evaluate", "nothing", "--tasks", folder / "bad.yaml") == 2
    assert "the tag !function is refused: a task holds only plain data" in capsys.readouterr().err


def test_a_pattern_that_takes_exponentially_long_is_stopped(monkeypatch):
    monkeypatch.setattr("meshpar.evaluation.patterns.LONGEST_S", 0.1)
    evil, text = Pattern("(.*?,){25}P"), "1," * 40
    start = time.monotonic()
    with pytest.raises(ConfigError, match="takes longer than"):
        evil.findall(text)
    with pytest.raises(ConfigError, match="takes longer than"):
        evil.sub("", text)
    assert time.monotonic() - start < 30
    assert Pattern("(a|a)b").sub("x", "aab", count=1) == "ax"


def test_a_pattern_that_is_none_is_refused():
    for wrong in ("(", "x" * 20_000):
        with pytest.raises(ConfigError, match="the pattern"):
            Pattern(wrong)
