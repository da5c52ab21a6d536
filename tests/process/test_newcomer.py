"""A newcomer's first hour: the README's commands, typed in one shell in a clone, up to a model of one's own, trained.

The slow test types every command as it stands. The one that runs in CI types those of `SAMPLE`, with trainings of two
steps. Nothing is downloaded: the clone's `.venv` finds its packages where these tests find theirs, so that
installation by `make` and `pip` is not tested.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.docs.page import QUICKLY, ROOT, Block, blocks, check_same, shell
from tests.docs.server import END

COMMANDS = {
    "meshpar": "-c 'from meshpar.cli import main; main()'",
    "pip": "-m pip",
    "pytest": "-m pytest",
}
SAMPLE = re.compile(r"make train|\. |meshpar explain|meshpar new|cd |meshpar train config.yaml$")
SHORT = "num_steps=2 optim.schedule.warmup_steps=1 data.held_out_rows=32"


@pytest.fixture
def clone(tmp_path) -> Path:
    """A clone of this working tree, with a `.venv` such as `make` makes."""
    unwanted = (ROOT / ".gitignore").read_text().replace("/", "").split()
    shutil.copytree(ROOT, tmp_path / "meshpar", ignore=shutil.ignore_patterns(".git", *unwanted))
    environment(tmp_path / "meshpar")
    return tmp_path / "meshpar"


def environment(clone: Path) -> None:
    venv = clone / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    packages = next(venv.glob("lib/python*/site-packages"))
    (packages / "present.pth").write_text(f"{clone}\n{sysconfig.get_path('purelib')}\n")
    for name, does in COMMANDS.items():
        (venv / "bin" / name).write_text(f'#!/bin/sh\nexec "{venv}/bin/python" -P {does} "$@"\n')
        (venv / "bin" / name).chmod(0o755)
    (venv / "installed").touch()


def variables() -> dict[str, str]:
    """The variables of a shell in which no environment of Python is active; XLA compiles quickly."""
    without_python = {key: value for key, value in shell().items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    folders = [folder for folder in without_python["PATH"].split(os.pathsep) if not (Path(folder) / "meshpar").exists()]
    return without_python | QUICKLY | {"PATH": os.pathsep.join(folders)}


def typed(code: list[str], folder: Path) -> list[str]:
    """The output of each block of commands, in a shell that ends at the first command that fails."""
    script = "".join(f"{block}\necho '{END}'\n" for block in code)
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=folder,
        env=variables(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    printed = done.stdout.split(f"{END}\n")
    assert done.returncode == 0, f"exit code {done.returncode} in\n{code[len(printed) - 1]}\n{printed[-1][-4000:]}"
    return printed[:-1]


def pasted(code: list[str], folder: Path, python: Path | str = sys.executable) -> list[str]:
    """The output of each block, pasted into an interactive Python and followed by the enter key."""
    done = subprocess.run(
        [python, "-i", "-q"],
        input="".join(f"{block}\n\nprint({END!r})\n" for block in code),
        cwd=folder,
        env=variables(),
        capture_output=True,
        text=True,
    )
    assert not re.search(r"^[\w.]*(Error|Exception)\b", done.stderr, re.MULTILINE), done.stderr[-4000:]
    return done.stdout.split(f"{END}\n")[:-1]


def sampled(block: Block) -> Block:
    lines = [line for line in block.code.splitlines() if SAMPLE.match(line)]
    lines = [f"{line} {SHORT}" if line.startswith("meshpar train") else line for line in lines]
    lines = [f"{line} ARGS='{SHORT}'" if line == "make train" else line for line in lines]
    return block._replace(code="\n".join(lines))


def of(page: Path, language: str) -> list[Block]:
    return [block for block in blocks(page) if block.language == language]


def losses(run_dir: Path) -> tuple[float, float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [record["loss"] for record in records if record["kind"] == "train"]
    return trained[0], trained[-1]


def test_the_python_of_the_readme_can_be_pasted(clone):
    program = of(ROOT / "README.md", "python")
    printed = pasted([block.code for block in program], clone, clone / ".venv/bin/python")
    check_same(ROOT / "README.md", program, printed)


def test_a_newcomer_trains_a_model_of_their_own(clone):
    commands = [sampled(block) for block in of(clone / "README.md", "sh")]
    check_same(clone / "README.md", commands, typed([block.code for block in commands], clone))
    for folder in ("runs/quickstart", "mymodel/runs/first"):
        first, last = losses(clone / folder)
        assert last < first


@pytest.mark.slow
def test_every_command_of_the_readmes_works_as_it_stands(clone):
    readme = of(clone / "README.md", "sh")
    check_same(clone / "README.md", readme, typed([block.code for block in readme], clone))
    project = of(clone / "mymodel" / "README.md", "sh")
    typed([". ../.venv/bin/activate", *[block.code for block in project]], clone / "mymodel")
    lines = [line.partition("#")[0].strip() for block in [*readme, *project] for line in block.code.splitlines()]
    trainings = {line for line in lines if line.startswith(("make train", "meshpar train"))}
    trained = [*clone.glob("runs/*"), *clone.glob("mymodel/runs/*")]
    assert len(trained) == len(trainings) == 6
    for folder in trained:
        first, last = losses(folder)
        assert last < 0.6 * first, folder


# The checks, checked --------------------------------------------------------------------------------------------


def test_control_a_command_that_fails_is_seen(tmp_path):
    assert typed(["cd /", "pwd; echo a >&2"], tmp_path) == ["", "/\na\n"]
    with pytest.raises(AssertionError, match=r"exit code 3 in\n *bash -c 'exit 3'"):
        typed(["true", "bash -c 'exit 3' | cat", "true"], tmp_path)
    with pytest.raises(AssertionError, match="meshpar: command not found"):
        typed(["meshpar --help"], tmp_path)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("def f():\n    a = 1\n\n    return a", "IndentationError"),
        ("x = (\n", "SyntaxError"),
    ],
)
def test_control_a_paste_that_fails_is_seen(code, message, tmp_path):
    assert pasted(["def f():\n    return 1", "print(f())"], tmp_path) == ["", "1\n"]
    with pytest.raises(AssertionError, match=message):
        pasted([code, "print(2)"], tmp_path)
