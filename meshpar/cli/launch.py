"""`meshpar launch`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from meshpar.cli.app import app, leave, writing
from meshpar.errors import ConfigError

VERB = "train"


@app.command(context_settings={"ignore_unknown_options": True})
def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- train CONFIG [KEY=VALUE]...", show_default=False)],
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
            metavar="DIR", help="Folder for the output of all processes but the first.", show_default="RUN_DIR/logs"
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
    """Trains in several processes, on this machine or in a job of Slurm.

    The first process prints to the terminal. When one dies or hangs, all end, and it is said which and why. A signal
    ends all after the same step, with a checkpoint and exit code 75.
    """
    from meshpar.checkpoint.saved import FOLDER, steps
    from meshpar.experiment.config import load
    from meshpar.experiment.elastic import Attempts
    from meshpar.launch.slurm import Job
    from meshpar.launch.supervise import supervise
    from meshpar.launch.workers import Group

    _check_options(slurm, {"--nodes": nodes > 1, "--sbatch": bool(sbatch), "--dry-run": dry_run})
    words = _words(command)
    run = load(words["config"], words["overrides"] or [])
    in_all = processes * nodes
    total = devices * in_all if devices else run.mesh.requested()
    if total and total % in_all:
        what = f"{in_all} processes cannot share the {total} devices of the mesh evenly"
        raise ConfigError(f"--processes {processes}: {what}; choose a number that divides {total}")
    folder = logs or run.run_dir / "logs"
    arguments = [*command, *(["--devices", str(total)] if devices else [])]
    if slurm:
        job = Job(arguments, nodes, processes, folder, sbatch or [])
        typer.echo(job.script() if dry_run else job.submit(), nl=not dry_run)
        return
    with writing("--logs", folder, "made"):
        folder.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-m", "meshpar", *arguments]
    group = Group(program, processes, folder, port, hang_after)

    attempts = Attempts(run, group, total)

    def newest() -> int | None:
        return max(steps(run.run_dir / FOLDER), default=None)

    ended = supervise(attempts, restarts, newest, attempts.members)
    if ended.code:
        leave(ended.code, ended.why)


def _check_options(slurm: bool, given: dict[str, bool]) -> None:
    """Raises ConfigError if an option of a job is given without one."""
    alone = [name for name, is_given in given.items() if is_given]
    if alone and not slurm:
        raise ConfigError(f"{', '.join(alone)}: for a job of Slurm; add --slurm")


def _words(command: list[str]) -> dict[str, Any]:
    """The arguments and options of the verb, checked before any process starts.

    Raises:
      ConfigError: the verb does not run in several processes.
    """
    if command[0] != VERB:
        raise ConfigError(f"launch {command[0]}: only {VERB} runs in several processes")
    verbs: Any = typer.main.get_command(app)
    return verbs.commands[VERB].make_context(VERB, command[1:]).params
