"""Every page of the docs, and the README, does what it says; `page.py` says how a page is read."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.page import (
    ROOT,
    blocks,
    check_command,
    check_config,
    check_folders,
    check_outputs,
    commands,
    configs,
)
from tests.docs.server import pasted

README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
LONG = {"inspect.md", "many-hosts.md"}
"""Pages that take a quarter of a minute, about commands that many other tests run."""
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def _id(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


# tests/process/test_newcomer.py runs the README.
@pytest.mark.parametrize(
    "page", [pytest.param(p, id=_id(p), marks=pytest.mark.slow if p.name in LONG else []) for p in DOCS]
)
def test_a_page_prints_what_it_shows(page, tmp_path):
    check_outputs(page, tmp_path)


@pytest.mark.parametrize("page", [README, *DOCS], ids=_id)
def test_each_block_of_python_can_be_pasted(page):
    """The blocks that are not run, too."""
    for block in blocks(page):
        if block.language == "python":
            assert list(pasted(block.code, str(page), block.line))


def test_the_blocks_are_formatted_but_for_empty_lines(tmp_path):
    """Ruff would put some into suites."""
    assert unformatted([page.read_text() for page in [README, *DOCS]], tmp_path) == []


def unformatted(texts: list[str], folder: Path) -> list[str]:
    """The lines, of the pages or of what Ruff makes of them, that the others do not have."""
    copies = [folder / f"{number}.md" for number in range(len(texts))]
    for copy, text in zip(copies, texts, strict=True):
        copy.write_text(text)
    ruff = [sys.executable, "-m", "ruff", "format", "-q", "--config", ROOT / "pyproject.toml"]
    subprocess.run([*ruff, *copies], check=True)
    lines: list[str] = []
    for copy, text in zip(copies, texts, strict=True):
        before, after = (list(filter(None, page.splitlines())) for page in (text, copy.read_text()))
        lines += [line for line in difflib.ndiff(before, after) if line.startswith(("-", "+"))] * (before != after)
    return lines


def test_control_a_block_that_is_not_formatted_is_seen(tmp_path):
    pages = ["```python\nx = 1\n```\n", "```python\nx =  1\n```\n"]
    assert unformatted(pages, tmp_path) == ["- x =  1", "+ x = 1"]


@pytest.mark.parametrize("line", [line for page in [README, *DOCS, *CONFIGS] for line in commands(page)])
def test_a_command_of_a_page_is_valid(line):
    check_command(line)


def test_each_training_of_the_pages_has_its_own_run_dir():
    check_folders(line for page in [README, *DOCS, *CONFIGS] for line in commands(page))


def test_each_page_that_writes_a_config_has_its_own_run_dir():
    """A reader may try one page after the other in one folder."""
    of_pages: dict[str, set[str]] = {}
    for page in [README, *DOCS]:
        for written in re.findall(r"<<'?END'?\n(.*?)^END$", page.read_text(), re.MULTILINE | re.DOTALL):
            for folder in re.findall(r"^run_dir: *(\S+)", written, re.MULTILINE):
                of_pages.setdefault(folder, set()).add(page.name)
    assert len(of_pages) > 1
    assert {folder: pages for folder, pages in of_pages.items() if len(pages) > 1} == {}


@pytest.mark.parametrize("text", [text for page in [README, *DOCS] for text in configs(page)])
def test_a_config_of_a_page_is_valid(text, tmp_path):
    check_config(text, tmp_path)


# The checks, checked --------------------------------------------------------------------------------------------

RIGHT = {
    "python": "```python\nx = 1\nprint(x)\n```\n\n```text\n1\n```\n\n```python\nprint(x + 1)\n```\n```text\n2\n```\n",
    "any lines": "```python\nprint('a', 'b', 'c', sep='\\n')\n```\n```text\na\n...\nc\n```\n",
    "sh": "```sh\necho a; echo b >&2; false\n```\n```text\na\nb\n```\n",
    "in the background": (
        "<!-- in the background -->\n```sh\n"
        "bash -c 'trap \"exit 0\" TERM; echo > began; echo a; echo b; while sleep 0.01; do :; done'\n"
        "```\n```text\na\nb\n```\n```sh\nls\n```\n```text\nbegan\nconfigs\npage.md\n```\n"
    ),
    "exempt": "<!-- not run: it would fail -->\n```python\n1 / 0\n```\n",
    "an illustration": "```python\nprint(1)\n```\nwords\n```text\n2\n```\n",
}
WRONG = {
    "output": ("```python\nprint(2)\n```\n```text\n3\n```\n", "but prints\n *2"),
    "output of sh": ("```sh\necho a\n```\n```text\nb\n```\n", "but prints\n *a"),
    "python, by its line": ("words\n\n```python\nx = 1\n1 / 0\n```\n", "page.md\", line 5.*ZeroDivisionError"),
    "a suite with no line below it": ("```python\nfor x in range(2):\n    x\nprint(x)\n```\n", "line 4.*SyntaxError"),
    "a suite with an empty line": ("```python\nif True:\n    x = 1\n\n    y = 2\n```\n", "line 5.*IndentationError"),
    "an open bracket": ("```python\nx = (\n```\n", "the block is not complete|was never closed"),
    "language": ("```py\n1 / 0\n```\n", "languages that nothing checks"),
    "between two exempt blocks": (
        "<!-- not run: a -->\n```sh\na\n```\n```python\n1 / 0\n```\n<!-- not run: b -->\n```sh\nb\n```\n",
        "ZeroDivisionError",
    ),
    "that counts on devices that nobody simulated": (
        "```python\nimport jax\nprint(jax.device_count())\n```\n```text\n8\n```\n", "but prints\n *1"
    ),
    "sh that counts on what Python set": (
        "```python\nimport os\nos.environ['A'] = '1'\n```\n```sh\necho $A\n```\n```text\n1\n```\n", "but prints\n *\n"
    ),
    "indented": ("- item\n  ```python\n  1 / 0\n  ```\n", "a fence that is indented"),
    "in the background, that SIGTERM kills": (
        "<!-- in the background -->\n```sh\nbash -c 'echo a; sleep 99'\n```\n```text\na\n```\n",
        r"ended with \[-15\]",
    ),
    "in the background, that ends early": (
        "<!-- in the background -->\n```sh\nbash -c 'echo a; exec >&- 2>&-; sleep 0.1'\n```\n```text\na\nb\n```\n",
        "but prints\n *a",
    ),
    "not closed": ("```python\n1 / 0\n", "a fence that is indented"),
}  # fmt: skip
WRONG_COMMANDS = {
    "meshpar trian configs/quickstart.yaml": "trian",
    "meshpar train configs/quickstart.yaml --jsn": "--jsn",
    "meshpar train configs/nothing.yaml": "nothing.yaml cannot be read",
    "meshpar train configs/quickstart.yaml num_step=3": "unknown key",
    "meshpar explain configs/quickstart.yaml mesh.tensor=3": "not divisible",
}


@pytest.fixture
def page(tmp_path):
    return tmp_path / "page.md"


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_page_passes(case, page, tmp_path):
    page.write_text(RIGHT[case])
    check_outputs(page, tmp_path)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_page_is_seen(case, page, tmp_path):
    text, message = WRONG[case]
    page.write_text(text)
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        check_outputs(page, tmp_path)


@pytest.mark.parametrize("line", WRONG_COMMANDS)
def test_a_wrong_command_is_seen(line):
    with pytest.raises(Exception, match=WRONG_COMMANDS[line]):
        check_command(line)


def test_the_commands_that_do_not_run_are_checked(page):
    page.write_text("```sh\nmeshpar a \\\n  b\nls\n```\n```sh\nmeshpar c\n```\n```text\nc\n```\n")
    assert commands(page) == ["meshpar a    b"]


@pytest.mark.parametrize(
    "lines",
    [
        ["meshpar train configs/fsdp.yaml", "meshpar train configs/quickstart.yaml run_dir=runs/fsdp"],
        ["meshpar train configs/fsdp.yaml lowering=auto"],
    ],
)
def test_control_two_trainings_in_one_run_dir_are_seen(lines):
    check_folders(["meshpar train configs/fsdp.yaml", "meshpar train configs/quickstart.yaml run_dir=runs/other"])
    with pytest.raises(AssertionError, match="goes on in runs/fsdp"):
        check_folders(lines)


def test_a_wrong_config_is_seen(tmp_path):
    check_config("rules: [megatron]\nmesh: {data: 2, fsdp: 1, tensor: 4}\n", tmp_path)
    with pytest.raises(Exception, match="unknown key"):
        check_config("rule: [megatron]\n", tmp_path)
