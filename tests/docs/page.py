"""The docs and the README do what they say: their code runs, and prints what they show.

- The `python` blocks of a page run in order, as one program in a fresh folder with `configs/` in it, and with nothing
  that a reader's shell does not have: no variable of JAX or XLA says how many devices there are. Modules are imported
  before, once for all pages. Lines are read as Python's prompt reads those that are pasted: a blank line ends a suite,
  so that there is one below it and none in it.
- A `text` block directly below a block is that block's output; a line `...` in it stands for any lines.
- An `sh` block runs if its output is shown; if not, each of its `meshpar` commands must fit the command line,
  its config load, and its arrays fit the mesh.
- `<!-- in the background -->` on the line above an `sh` block: its command runs until the end of the page. The page
  continues when it has printed the lines that are shown, and SIGTERM must end it with code 0.
- A `yaml` block is a config, or the part of one that changes the quickstart.
- `<!-- not run: why -->` on the line above a block exempts it. Nothing else is skipped: another language, or a fence
  that is ambiguous, is an error.
"""

from __future__ import annotations

import atexit
import doctest
import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import typer

from meshpar import cli, federated
from meshpar.experiment.config import load
from meshpar.experiment.prepare import prepare
from tests.docs.server import COMMAND, END
from tests.xla import FLAGS

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"(?P<exempt>^<!-- not run: [^\n]+ -->\n)?"
    r"(?P<background>^<!-- in the background -->\n)?"
    r"^```(?P<language>\w*)\n(?P<code>.*?)^```$"
    r"(?:\n+^```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
LANGUAGES = {"python", "sh", "text", "yaml"}


class Block(NamedTuple):
    """One block of a page; `line` is the number of its fence, counted from 1."""

    language: str
    line: int
    code: str
    output: str | None
    exempt: bool
    background: bool

    @property
    def runs(self) -> bool:
        return not self.exempt and (self.language == "python" or (self.language == "sh" and self.output is not None))

    @property
    def num_lines(self) -> int | None:
        """The lines that a command in the background prints before the page continues."""
        return (self.output or "").count("\n") if self.background else None


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    assert "```" not in BLOCK.sub("", text), f"{page}: a fence that is indented, has options, or is not closed"
    found = [
        Block(
            m["language"],
            text.count("\n", 0, m.start("code")),
            m["code"],
            m["output"],
            bool(m["exempt"]),
            bool(m["background"]),
        )
        for m in BLOCK.finditer(text)
    ]
    unknown = [f"{page}:{b.line}: {b.language!r}" for b in found if b.language not in LANGUAGES and not b.exempt]
    assert not unknown, f"languages that nothing checks: {unknown}"
    return found


KEPT = {"JAX_PLATFORMS", "JAX_ENABLE_COMPILATION_CACHE"}


def shell() -> dict[str, str]:
    """The environment of a reader whose `.venv` is active and whose terminal has 100 columns.

    The variables of JAX and XLA that the tests run under are left out, but for two. Where there is an accelerator, the
    whole suite needs JAX_PLATFORMS=cpu, and so do the pages, which show simulated devices. And no page may read or
    write the compilation cache in the home of whoever runs the tests.
    """
    theirs = {k: v for k, v in os.environ.items() if k in KEPT or not k.startswith(("JAX_", "XLA_"))}
    return theirs | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}


OPTIMIZED = ("inspect.md", "14-precision.md")
"""Pages that show what XLA's optimizations make: names that are followed through fusions, and memory."""

COUNTED = ("plan.md", "14-precision.md")
"""Pages that show what a version of JAX counts and stores. With another one only their words are compared."""
COUNTED_BY = "0.10.2"

QUICKLY = {"XLA_FLAGS": FLAGS, "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "1"}


@functools.cache
def forking(optimized: bool) -> dict[str, str]:
    """The environment of a page whose commands `page` and `meshpar` ask a server for a fork."""
    env = shell() | ({} if optimized else QUICKLY)
    folder = TemporaryDirectory()
    address, bin_folder = f"{folder.name}/server", Path(folder.name, "bin")
    bin_folder.mkdir()
    for name in ("page", "meshpar"):
        (bin_folder / name).write_text(COMMAND.format(python=sys.executable, address=address))
        (bin_folder / name).chmod(0o700)
    code = Path(__file__).with_name("server.py").read_text()
    command = [sys.executable, "-c", code, address]
    server = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout and server.stdout.readline() == "listening\n"
    atexit.register(folder.cleanup)
    atexit.register(server.communicate)
    atexit.register(server.kill)
    return env | {"PATH": f"{bin_folder}{os.pathsep}{env['PATH']}"}


def outputs(page: Path, program: list[Block], folder: Path) -> list[str]:
    """What each block prints, run in order in one process with `folder` as the working directory.

    JAX and XLA compile quickly, as in the other tests. A reader's XLA optimizes, which changes figures of two pages.
    """
    (folder / "configs").symlink_to(ROOT / "configs")
    env = forking(page.name in OPTIMIZED)
    done = subprocess.run(
        [f"{env['PATH'].partition(os.pathsep)[0]}/page", page],
        input=json.dumps([(b.language, b.line, b.code, b.num_lines) for b in program]),
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.split(f"{END}\n")[:-1]


def check_outputs(page: Path, folder: Path) -> None:
    program = [b for b in blocks(page) if b.runs]
    check_same(page, program, outputs(page, program, folder))


def check_same(page: Path, program: list[Block], printed: list[str]) -> None:
    for block, got in zip(program, printed, strict=True):
        read = _without_figures if page.name in COUNTED and version("jax") != COUNTED_BY else _stripped
        same = block.output is None or doctest.OutputChecker().check_output(
            read(block.output), read(got), doctest.ELLIPSIS
        )
        assert same, f"{page}:{block.line} shows\n{block.output}\nbut prints\n{got}"


def _without_figures(text: str) -> str:
    return re.sub(r"(?<![.\d])\d[\d.,]*| +", " ", _stripped(text))


def check_command(line: str) -> None:
    """Parses a `meshpar` command and prepares its config without devices."""
    words = shlex.split(line, comments=True)[1:]
    meshpar = typer.main.get_group(cli.verbs())
    name, verb, rest = meshpar.resolve_command(meshpar.context_class(meshpar), words)
    assert verb is not None, "resolve_command raises for an unknown verb"
    given = verb.make_context(name, rest).params
    if "config" in given:
        arguments = [a for value in given.values() if isinstance(value, (list, tuple)) for a in value]
        changes = [a for a in arguments if "=" in a]
        if name == "federated":
            federated.load(ROOT / given["config"], changes)
            return
        loaded = load(ROOT / given["config"], changes)
        prepare(loaded, loaded.mesh.abstract(given.get("devices")))


def check_config(text: str, folder: Path) -> None:
    """Loads a page's config, over the quickstart if it is only a part of one."""
    (folder / "quickstart.yaml").write_text((ROOT / "configs" / "quickstart.yaml").read_text())
    whole = re.search(r"^(extends|model):", text, re.MULTILINE)
    (folder / "page.yaml").write_text(text if whole else f"extends: quickstart.yaml\n{text}")
    loaded = load(folder / "page.yaml")
    prepare(loaded, loaded.mesh.abstract())


def commands(page: Path) -> list[str]:
    """The `meshpar` commands of a page that the tests do not run; of a config file, those in its comments."""
    if page.suffix == ".yaml":
        return re.findall(r"^#   (meshpar .*)$", page.read_text(), re.MULTILINE)
    joined = (b.code.replace("\\\n", " ") for b in blocks(page) if b.language == "sh" and not (b.runs or b.exempt))
    return [line for code in joined for line in code.splitlines() if line.startswith("meshpar ")]


def check_folders(lines: Iterable[str]) -> None:
    """Checks that different trainings have different `run_dir`s: in a shared one, the second would resume the first.

    An unchanged config counts as a training, because a reader may have run it before.
    """
    trained: dict[Path, str] = {}
    for line in dict.fromkeys(lines):
        words = shlex.split(line, comments=True)
        if words[1] != "train" or not (ROOT / words[2]).is_file():
            continue
        changes = [word for word in words[3:] if "=" in word]
        if changes:
            trained.setdefault(load(ROOT / words[2]).run_dir, f"meshpar train {words[2]}")
        folder = load(ROOT / words[2], changes).run_dir
        first = trained.setdefault(folder, line)
        assert first == line, f"{line} goes on in {folder}, where {first} ends"


def configs(page: Path) -> list[str]:
    return [b.code for b in blocks(page) if b.language == "yaml" and not b.exempt]


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"
