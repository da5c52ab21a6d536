"""Runs a program under Slurm, by a batch script with one process per task and a requeue after a signal."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshpar.errors import ConfigError, Problems, control_character
from meshpar.mesh.join import INTERRUPTED

WARNING_S = 120
"""Seconds before the end of its time at which a job receives SIGUSR1, to save a checkpoint."""


_OPTION = re.compile(r"--[a-z][a-z-]*(=.*)?|-[A-Za-z]( ?[^\s-].*)?")
_SAFE = re.compile(r"[\w@%+=:,./-]+", re.ASCII)


@dataclass(frozen=True)
class Job:
    """A job of Slurm.

    Args:
      command: the arguments of `meshpar`, such as ["train", "config.yaml"].
      nodes: number of hosts.
      processes: number of processes on each host.
      logs: the folder of the job's output, with one file per process.
      options: further options of sbatch, such as "--partition=long".

    Raises:
      ConfigError: lists the options, and the folder, that a batch script cannot contain.
    """

    command: Sequence[str]
    nodes: int
    processes: int
    logs: Path
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        problems = Problems()
        for option in self.options:
            if control := control_character(option):
                problems.add(f"--sbatch {option}", f"contains the control character {control}", "leave it out")
            elif not _OPTION.fullmatch(option):
                problems.add(f"--sbatch {option}", "is not one option of sbatch", "write it like --partition=long")
        if "\\" in str(self.logs) or control_character(str(self.logs)):
            what = "Slurm cannot write to a file whose name contains a backslash or a control character"
            problems.add(f"--logs {self.logs}", what, "--logs DIR, or another run_dir")
        problems.raise_any(ConfigError, "the Slurm job cannot run:")

    def __str__(self) -> str:
        """The script, for sbatch.

        A signal from Slurm, or from `scancel --signal`, ends the run after a step with a checkpoint and exit code 75.
        The script then requeues the job. srun ends all processes when one fails.

        >>> print(Job(["train", "my run.yaml"], 16, 8, Path("run/logs"), ["--gpus-per-node=8"]))
        #!/bin/bash
        #SBATCH --job-name=meshpar
        #SBATCH --nodes=16
        #SBATCH --ntasks-per-node=8
        #SBATCH --signal=USR1@120
        #SBATCH --requeue
        #SBATCH --open-mode=append
        #SBATCH --output=run/logs/slurm-%j.log
        #SBATCH --gpus-per-node=8
        srun --kill-on-bad-exit=1 --output=run/logs/process-%t.log meshpar train 'my run.yaml'
        code=$?
        if [ $code -eq 75 ]; then
          scontrol requeue "$SLURM_JOB_ID"
        fi
        exit $code
        <BLANKLINE>
        """
        logs = str(self.logs).replace("%", "%%")
        options = [
            "--job-name=meshpar",
            f"--nodes={self.nodes}",
            f"--ntasks-per-node={self.processes}",
            f"--signal=USR1@{WARNING_S}",
            "--requeue",
            "--open-mode=append",
            f"--output={logs}/slurm-%j.log",
            *self.options,
        ]
        step = ["srun", "--kill-on-bad-exit=1", f"--output={logs}/process-%t.log", "meshpar", *self.command]
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {_sbatch_word(option)}" for option in options),
            " ".join(map(_bash_word, step)),
            "code=$?",
            f"if [ $code -eq {INTERRUPTED} ]; then",
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            "exit $code",
        ]
        return "\n".join(lines) + "\n"

    def submit(self) -> str:
        """Submits the job; returns the output of sbatch.

        Raises:
          ConfigError: there is no sbatch, or it refuses the job.
        """
        if shutil.which("sbatch") is None:
            raise ConfigError("--slurm: sbatch is not on PATH; --dry-run prints the script, for a host that has it")
        self.logs.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["sbatch"], input=str(self), text=True, capture_output=True, check=False)
        if done.returncode:
            raise ConfigError(f"--slurm: sbatch refuses the job: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout.strip()


def _sbatch_word(option: str) -> str:
    """An option for an `#SBATCH` line. sbatch reads quotes there as a shell does, and a backslash in all quotes.

    >>> print(_sbatch_word("--partition=long"), _sbatch_word('--comment=my "first" job'), _sbatch_word("-p long"))
    --partition=long --comment="my \\"first\\" job" -p long
    """
    name, separator, value = re.fullmatch(r"(--[^=]*|-.)(=| |)(.*)", option).groups()  # pyright: ignore
    if _SAFE.fullmatch(value) or not value:
        return option
    quoted = re.sub(r'(["\\])', r"\\\1", value)
    return f'{name}{separator}"{quoted}"'


def _bash_word(word: str) -> str:
    """A word for bash. One that would write a control character into the script has it as an escape.

    >>> print(_bash_word("my run.yaml"), _bash_word("two\\nlines"))
    'my run.yaml' $'two\\nlines'
    """
    if not control_character(word):
        return shlex.quote(word)
    escapes = {"\n": "\\n", "\t": "\\t", "'": "\\'", "\\": "\\\\"}
    shown = (
        escapes.get(c) or (c if c.isprintable() else "".join(f"\\x{byte:02x}" for byte in os.fsencode(c))) for c in word
    )
    return f"$'{''.join(shown)}'"
