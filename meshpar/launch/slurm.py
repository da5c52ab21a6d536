"""Runs a program under Slurm, by a batch script with one process per task and a requeue after a signal."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshpar.errors import ConfigError
from meshpar.mesh.join import INTERRUPTED

WARNING_S = 120
"""Seconds before the end of its time at which a job receives SIGUSR1, to save a checkpoint."""


@dataclass(frozen=True)
class Job:
    """A job of Slurm.

    Args:
      command: the arguments of `meshpar`, such as ["train", "config.yaml"].
      nodes: number of hosts.
      processes: number of processes on each host.
      logs: the folder of the job's output, with one file per process.
      options: further options of sbatch, such as "--partition=long".
    """

    command: Sequence[str]
    nodes: int
    processes: int
    logs: Path
    options: Sequence[str] = ()

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
        options = [
            "--job-name=meshpar",
            f"--nodes={self.nodes}",
            f"--ntasks-per-node={self.processes}",
            f"--signal=USR1@{WARNING_S}",
            "--requeue",
            "--open-mode=append",
            f"--output={self.logs}/slurm-%j.log",
            *self.options,
        ]
        step = ["srun", "--kill-on-bad-exit=1", f"--output={self.logs}/process-%t.log", "meshpar", *self.command]
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            shlex.join(step),
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
