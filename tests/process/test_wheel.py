"""What pip installs: a wheel starts in an empty folder, an editable install is found from every folder, and the image's
commands do what the Dockerfile means.

Nothing is downloaded: the dependencies are those of these tests.
"""

from __future__ import annotations

import email
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.docs.page import QUICKLY, ROOT, blocks, shell

HERE = ROOT / "PYPI.md"
QUICKSTART = "configs/quickstart.yaml"
SHORT = "num_steps=2 optim.schedule.warmup_steps=1 log_every=1 data.held_out_rows=32"


def copied(folder: Path) -> Path:
    """A copy of the working tree, as git would clone it, in a folder called meshpar."""
    unwanted = (ROOT / ".gitignore").read_text().replace("/", "").split()
    ignored = shutil.ignore_patterns(".git", *unwanted)
    return shutil.copytree(ROOT, folder / "meshpar", ignore=ignored, symlinks=True)


def environment(folder: Path) -> Path:
    """The Python of a new environment, which finds the dependencies where these tests do, but not meshpar."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    # A path file in a folder that a path file names is not read: an editable meshpar is not found.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin" / "python"


def run(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    variables = QUICKLY | {key: value for key, value in shell().items() if not key.startswith("PYTHON")}
    return subprocess.run(
        words, cwd=cwd, env=variables, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )


def succeeds(*words: str | Path, cwd: Path) -> str:
    done = run(*words, cwd=cwd)
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def pip(python: Path, *words: str | Path, cwd: Path) -> str:
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    return succeeds(python, "-P", "-m", "pip", *words, *options, cwd=cwd)


# The wheel -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip(Path(sys.executable), "wheel", copied(folder), "--wheel-dir", folder, cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The Python of an environment with the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    python = environment(folder / ".venv")
    pip(python, "install", wheel, cwd=folder)
    return python


def test_a_wheel_writes_its_quickstart_and_trains_it(installed, tmp_path):
    """The first commands of the page on PyPI, the training with two steps."""
    first, explains = (block.code for block in blocks(HERE) if block.language == "sh")
    commands = [line.split() for line in f"{first}{explains}".splitlines()]
    assert [words[1] for words in commands] == ["install", "new", "train", "explain", "inspect", "verify"]
    _, new, train, explain, *_ = commands
    meshpar = installed.with_name("meshpar")
    assert succeeds(meshpar, *new[1:], cwd=tmp_path) == f"{QUICKSTART}\n"
    assert (tmp_path / QUICKSTART).read_bytes() == (ROOT / QUICKSTART).read_bytes()
    succeeds(meshpar, *train[1:], *SHORT.split(), cwd=tmp_path)
    records = (tmp_path / "runs/quickstart/metrics.jsonl").read_text().splitlines()
    assert [r["step"] for r in map(json.loads, records) if r["kind"] == "train"] == [1, 2]
    assert "blocks.mlp.up.kernel" in succeeds(meshpar, *explain[1:], cwd=tmp_path)


def test_a_wheel_holds_everything_that_the_package_reads(wheel):
    """Each file of the package in git, and each config with the code of the examples."""
    listed = subprocess.run(["git", "ls-files", "meshpar"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    files = {path for path in listed if (ROOT / path).is_file()} or pytest.skip("no clone of git's")
    configs = {
        f"meshpar/cli/configs/{path.relative_to(ROOT / 'configs')}"
        for path in (ROOT / "configs").rglob("*")
        if path.suffix in (".yaml", ".py")
    }
    with ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("meshpar/")}
    assert held == files | configs


def test_the_page_on_pypi_has_no_link_that_is_dead_there(wheel):
    with ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        about = email.message_from_bytes(archive.read(metadata))
    assert re.findall(r"\]\((?!https://)|(?:src|href|srcset)=", about.get_payload()) == []
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(
        about.get_all("Classifier")
    )


def test_a_version_is_that_of_the_wheel(installed, tmp_path):
    program = "import meshpar; print(meshpar.__version__, meshpar.__file__)"
    told, file = succeeds(installed, "-c", program, cwd=tmp_path).split()
    assert told == version("meshpar")
    assert Path(file).is_relative_to(installed.parents[1])


# An editable install ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def editable(tmp_path_factory) -> tuple[Path, Path]:
    """A clone, and the Python of an environment with `pip install -e` of it."""
    folder = tmp_path_factory.mktemp("editable")
    clone = copied(folder)
    python = environment(folder / "venv")
    pip(python, "install", "-e", clone, cwd=folder)
    return clone, python


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", [".", "..", "docs", "/"])
def test_an_editable_install_is_found_from_every_folder(where, editable):
    """Also from the folder that holds the clone, in which `meshpar` is the clone and not the package."""
    clone, python = editable
    program = "from meshpar import training; import meshpar; print(meshpar.__file__)"
    assert Path(succeeds(python, "-c", program, cwd=clone / where).strip()) == clone / "meshpar" / "__init__.py"


def test_a_type_checker_outside_the_clone_sees_the_types(editable, tmp_path):
    """basedpyright reads paths, and not import hooks."""
    checker = shutil.which("basedpyright", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert checker
    (tmp_path / "mine.py").write_text("from meshpar import MeshLayout\n\nlayout: str = MeshLayout(data=2)\n")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    done = run(checker, "--pythonpath", editable[1], "--outputjson", "mine.py", cwd=tmp_path)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert [problem["rule"] for problem in found] == ["reportAssignmentType"], found


# The image -------------------------------------------------------------------------------------------------------


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Each instruction and its arguments."""
    joined = dockerfile.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in joined if line and not line.startswith("#")]


def test_the_commands_of_the_image_install_and_start_meshpar(tmp_path):
    """Without Docker: in an empty environment, with the image's folders below a temporary one."""
    python = environment(tmp_path / "venv")
    built = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "JAX": ""}
    # The environment has no network: what pip builds with is that of these tests, and nothing is downloaded.
    built |= {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}
    (tmp_path / "venv/bin/pip").write_text(f'#!/bin/sh\nexec {python} -P -m pip "$@"\n')
    (tmp_path / "venv/bin/pip").chmod(0o755)
    where = tmp_path
    for name, arguments in instructions((ROOT / "Dockerfile").read_text()):
        match name:
            case "COPY":
                source, target = arguments.split()
                assert source == "."
                copied(tmp_path / "context").rename(_made(tmp_path, target))
            case "WORKDIR":
                where = _made(tmp_path, arguments)
                where.mkdir()
            case "RUN" | "CMD":
                command = shlex.join(json.loads(arguments)) if name == "CMD" else arguments
                command = command.replace("/opt/", f"{tmp_path}/opt/")
                done = subprocess.run(["sh", "-c", command], cwd=where, env=built, capture_output=True, text=True)
                assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
            case _:
                assert name in ("FROM", "ARG"), f"{name}: this test does not know it"
    assert (where / QUICKSTART).is_file()
    assert "Usage: meshpar" in done.stdout


def _made(root: Path, target: str) -> Path:
    """A path of the image below a root, whose parent exists."""
    path = root / target.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
