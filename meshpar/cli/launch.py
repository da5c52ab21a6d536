"""`meshpar launch`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from meshpar.cli.app import app, leave, writing
from meshpar.cli.programs import TRAIN, VERIFY, parse
from meshpar.errors import ConfigError


@app.command(context_settings={"ignore_unknown_options": True})
def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- VERB CONFIG [KEY=VALUE]...", show_default=False)],
    processes: Annotated[int, typer.Option(min=1, help="Number of processes; with --slurm, on each node.")],
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Number of CPU devices that each process simulates.", show_default="the mesh's share"),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the first process, on loopback.", show_default="free")
    ] = None,
    logs: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the output of all processes but the first.",
            show_default="RUN_DIR/logs; ./logs",
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="The most restarts from the last checkpoint after a process died or hung.")
    ] = 0,
    hang_after: Annotated[
        float, typer.Option(min=1, help="Seconds without a step after which processes count as hung.")
    ] = 300.0,
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit a job to Slurm instead.")] = False,
    nodes: Annotated[int, typer.Option(min=1, help="Number of hosts of the job.")] = 1,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="An option of sbatch, as --partition=long; can be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job's script, and submit nothing.")] = False,
) -> None:
    """Runs train, generate, verify, inspect or bench in several processes, on this machine or in a job of Slurm.

    The first process prints to the terminal. When one dies or hangs, all end, and it is said which and why. A signal
    ends all after the same step, with a checkpoint and exit code 75.
    """
    from meshpar.checkpoint.saved import FOLDER, steps
    from meshpar.launch.slurm import Job
    from meshpar.launch.supervise import supervise
    from meshpar.launch.workers import Group

    _check_options(slurm, {"--nodes": nodes > 1, "--sbatch": bool(sbatch), "--dry-run": dry_run})
    program = parse(command)
    if restarts and program.verb != TRAIN:
        raise ConfigError(f"--restarts: {program.verb} has no checkpoints to start from; leave it out")
    if devices and program.verb == VERIFY:
        raise ConfigError("--devices: verify simulates as many as its small mesh has; leave it out")
    in_all = processes * nodes
    total = devices * in_all if devices else program.num_devices
    if total and total % in_all:
        what = f"{in_all} processes cannot share the {total} devices of the mesh evenly"
        raise ConfigError(f"--processes {processes}: {what}; choose a number that divides {total}")
    folder = logs or program.logs
    arguments = [*command, *(["--devices", str(total)] if devices else [])]
    if slurm:
        job = Job(arguments, nodes, processes, folder, sbatch or [])
        typer.echo(job.script() if dry_run else job.submit(), nl=not dry_run)
        return
    with writing("--logs", folder, "made"):
        folder.mkdir(parents=True, exist_ok=True)
    group = Group([sys.executable, "-m", "meshpar", *arguments], processes, folder, port, hang_after)

    def newest() -> int | None:
        return max(steps(program.run_dir / FOLDER), default=None) if program.run_dir else None

    ended = supervise(group.run, restarts, newest)
    if ended.code:
        leave(ended.code, ended.why)


def _check_options(slurm: bool, given: dict[str, bool]) -> None:
    """Raises ConfigError if an option of a job is given without one."""
    alone = [name for name, is_given in given.items() if is_given]
    if alone and not slurm:
        raise ConfigError(f"{', '.join(alone)}: for a job of Slurm; add --slurm")
