"""`meshpar launch`."""

from __future__ import annotations

import sys
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import typer

from meshpar.cli.app import app, leave, writing
from meshpar.cli.programs import TRAIN, VERIFY, parse
from meshpar.errors import ConfigError

LOOPBACK = "127.0.0.1"
SLURM, K8S = "--slurm", "--k8s"


@app.command(context_settings={"ignore_unknown_options": True})
def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- VERB CONFIG [KEY=VALUE]...", show_default=False)],
    processes: Annotated[int, typer.Option(min=1, help="Number of processes; in a job, on each node.")],
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Number of CPU devices that each process simulates.", show_default="the mesh's share"),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the first process.", show_default="free")
    ] = None,
    host: Annotated[str, typer.Option(help="Address of the interface at which the first process listens.")] = LOOPBACK,
    logs: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the output of each process.",
            show_default="RUN_DIR/logs; ./logs",
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="The most restarts from the last checkpoint after a process died or hung.")
    ] = 0,
    hang_after: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Seconds without a step after which processes count as hung.",
            show_default="10 times the median step, at least 30; 300 until it is known",
        ),
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit a job to Slurm instead.")] = False,
    k8s: Annotated[bool, typer.Option("--k8s", help="Create a JobSet in Kubernetes instead.")] = False,
    nodes: Annotated[int, typer.Option(min=1, help="Number of hosts of the job.")] = 1,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="An option of sbatch, such as --partition=long; can be repeated."),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Image of the pods' containers, with meshpar and the config.", show_default=False)
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the JobSet.", show_default="that of the run_dir")] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option(metavar="CLAIM:PATH", help="A persistent volume claim, and where it is mounted; can be repeated."),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="RESOURCE=N", help="A resource of a pod, such as nvidia.com/gpu=8; can be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job, and submit nothing.")] = False,
) -> None:
    """Runs train, generate, verify, inspect or bench in several processes, on this machine or in a scheduler's job.

    The first process prints to the terminal. If a process dies or hangs, all end, and a message names it.
    A signal ends all of them after the same step, with a checkpoint and exit code 75.
    """
    from meshpar.checkpoint.lock import check_unheld
    from meshpar.checkpoint.memory import last_step
    from meshpar.experiment.elastic import Attempts
    from meshpar.launch.jobset import JobSet, named, parse_pairs
    from meshpar.launch.slurm import Job
    from meshpar.launch.supervise import supervise
    from meshpar.launch.workers import Group, count_gpus
    from meshpar.mesh import roll_call

    scheduler = [option for option, is_given in ((SLURM, slurm), (K8S, k8s)) if is_given]
    _check_options(
        scheduler,
        {"--nodes": nodes > 1, "--dry-run": dry_run},
        {"--sbatch": sbatch},
        {"--image": image, "--name": name, "--volume": volume, "--limit": limit},
    )
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
    if scheduler:
        if slurm:
            job = Job(arguments, nodes, processes, folder, sbatch or [])
        else:
            run_dir = program.run_dir and PurePosixPath(program.run_dir)
            job = JobSet(
                arguments, in_all, image or "", name or named(run_dir.name if run_dir else program.verb), run_dir,
                parse_pairs("--volume", volume or [], ":", "CLAIM:PATH"),
                parse_pairs("--limit", limit or [], "=", "RESOURCE=N"), restarts,
            )  # fmt: skip
        typer.echo(str(job) if dry_run else job.submit(), nl=not dry_run)
        return
    if program.run_dir:
        check_unheld(program.run_dir)
    roll_call.check_free(f"{host}:{port or 0}")
    with writing("--logs", folder, "made"):
        folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "meshpar", *arguments]
    group = Group(words, processes, folder, port, hang_after, host, num_gpus=count_gpus() // processes)
    run = program.run
    if run is None:
        ended = group.run()
    else:
        attempts = Attempts(run, group, total)
        ended = supervise(attempts, restarts, lambda: last_step(run.run_dir), attempts.members)
    if ended.code:
        leave(ended.code, ended.why)


def _check_options(
    scheduler: list[str], of_jobs: dict[str, Any], of_slurm: dict[str, Any], of_k8s: dict[str, Any]
) -> None:
    """Raises ConfigError if an option is missing, or belongs to another kind of launch."""
    if len(scheduler) > 1:
        raise ConfigError(f"{SLURM} and {K8S}: a job has one scheduler; leave one of them out")
    for options, fix in ((of_jobs, [SLURM, K8S]), (of_slurm, [SLURM]), (of_k8s, [K8S])):
        given = [name for name, value in options.items() if value]
        if given and not set(scheduler) & set(fix):
            raise ConfigError(f"{', '.join(given)}: for a scheduler's job; add {' or '.join(fix)}")
    if K8S in scheduler and not of_k8s["--image"]:
        raise ConfigError(f"{K8S}: the pods need an image; add --image IMAGE")
