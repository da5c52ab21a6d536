"""Every Python block of the docs runs; every printed result is the one that the page shows.

The Python blocks of a page run in order, as one program. A `text` block that follows a Python block is its
output. A line of a `sh` block that begins with `meshpar` must parse: its verb, options and config exist.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
MARK = "=== end of block ==="


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text())


def program(page: Path) -> tuple[str, list[str | None]]:
    """The page's Python as one program that prints MARK after each block, and what each should have printed."""
    code, expected = "", []
    for i, (language, text) in enumerate(found := blocks(page)):
        if language == "python":
            follows = found[i + 1] if i + 1 < len(found) else ("", "")
            code += f"{text}\nprint({MARK!r})\n"
            expected.append(follows[1] if follows[0] == "text" else None)
    return code, expected


def run(code: str) -> list[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split(MARK + "\n")[:-1]


def with_python(page: Path) -> bool:
    return any(language == "python" for language, _ in blocks(page))


@pytest.mark.parametrize("page", filter(with_python, PAGES), ids=lambda page: page.name)
def test_the_python_of_a_page_runs_and_prints_what_it_shows(page):
    code, expected = program(page)
    for got, want in zip(run(code), expected, strict=True):
        assert want is None or got.strip() == want.strip()


def test_a_wrong_output_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n")
    code, expected = program(page)
    assert run(code)[0].strip() != expected[0].strip()


COMMANDS = [
    (page, line)
    for page in PAGES
    for language, text in blocks(page)
    if language == "sh"
    for line in text.splitlines()
    if line.startswith("meshpar ")
]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=lambda value: getattr(value, "name", value))
def test_a_command_of_a_page_names_a_verb_options_and_a_config_that_exist(page, line):
    from typer.testing import CliRunner

    from meshpar import run
    from meshpar.cli import app

    words = line.split("#")[0].split()[1:]
    assert CliRunner().invoke(app, [words[0], "--help"]).exit_code == 0
    help_text = CliRunner().invoke(app, [words[0], "--help"], env={"COLUMNS": "200"}).output
    assert all(word in help_text for word in words if word.startswith("--"))
    configs = [word for word in words if word.endswith(".yaml")]
    overrides = [word for word in words if "=" in word]
    assert all(run.load(ROOT / config, overrides) for config in configs)
