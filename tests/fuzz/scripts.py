"""What the scripts and manifests of `meshpar launch` make of any text, according to those who read them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

PIECES = (
    "\n", "\r", "\t", "\x1b[2J", "\x1b]0;owned\x07", "\x7f", "\x85", "\u2028", "\u202e", "'", '"', "`", "\\", "$",
    "#", "%", "%j", "%%", " ", ";", "&", "|", "(", ")", "<", ">", "*", "~", "!", "=", ":", "- ", "{", "}", "[", "@",
    ",", "$$", "$(touch CANARY)", "`touch CANARY`", "\ntouch CANARY\n", "\n#SBATCH --wrap=x\n", "'; touch CANARY; '",
    '"; touch CANARY; "', "&& touch CANARY", "$HOME", "${HOME}", "$(MESHPAR_PROCESS)", "$$(MESHPAR_PROCESS)",
    "\n  hostNetwork: true\n", "---\n", "größe", "模型", "a", "run", "x/y", "-n", "--x", "null", "1e3", "yes",
    "#SBATCH",
)  # fmt: skip
"""What may mean something to bash, sbatch, YAML, Kubernetes or a terminal."""


def run_by_bash(script: str, folder: Path) -> list[list[str]]:
    """The commands that a script calls, with stand-ins for those of Slurm; each call is a list of words.

    The folder has no file afterwards that was not there before, unless the script made it.
    """
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    called = folder / "called"
    called.unlink(missing_ok=True)
    for name in ("srun", "scontrol"):
        stub = programs / name
        if not stub.exists():
            stub.write_text(f'#!/bin/bash\nprintf "%s\\0" {name} "$@" >> "{called}"\nprintf "\\n\\0" >> "{called}"\n')
            stub.chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "HOME": "/nowhere"}
    (folder / "work").mkdir(exist_ok=True)
    done = subprocess.run(
        ["bash"], input=os.fsencode(script), cwd=folder / "work", env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    words = os.fsdecode(called.read_bytes()).split("\0")[:-1]
    calls: list[list[str]] = [[]]
    for word in words:
        if word == "\n":
            calls.append([])
        else:
            calls[-1].append(word)
    return calls[:-1]


def read_by_sbatch(script: str) -> list[str]:
    """The words of all `#SBATCH` lines, as `_get_argument` of Slurm's sbatch reads them.

    sbatch reads the lines up to the first that is not a comment. Quotes group words, a backslash protects the next
    character in all quotes and outside of them, and a bare # begins a comment.
    """
    words: list[str] = []
    for line in script.split("\n")[1:]:
        if not line.startswith("#"):
            break
        if not line.startswith("#SBATCH"):
            continue
        word, begun, quote, escaped = "", False, "", False
        for c in line.removeprefix("#SBATCH"):
            if escaped:
                word, escaped = word + c, False
            elif c == "\\":
                begun = escaped = True
            elif quote:
                word, quote = (word, "") if c == quote else (word + c, quote)
            elif c in "\"'":
                begun, quote = True, c
            elif c == "#":
                break
            elif c.isspace():
                words += [word] if begun else []
                word, begun = "", False
            else:
                word, begun = word + c, True
        assert not quote, line
        words += [word] if begun else []
    return words


def expanded_by_kubernetes(word: str, variables: dict[str, str]) -> str:
    """A word of a pod's command: $(NAME) is the value of a variable that exists, $$ is $ (API reference, Container)."""

    def expanded(match: re.Match[str]) -> str:
        return "$" if match.group() == "$$" else variables.get(match.group(1), match.group())

    return re.sub(r"\$\$|\$\(([^)]*)\)", expanded, word)
