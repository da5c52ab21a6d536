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
    processes: Annotated[int, typer.Option(min=1, help="Number of processes.")],
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
) -> None:
    """Trains in several processes on this machine, as the hosts or GPUs of a cluster do.

    The first process prints to the terminal. When one dies or hangs, all end, and it is said which and why. A signal
    ends all after the same step, with a checkpoint and exit code 75.
    """
    from meshpar.checkpoint.saved import FOLDER, steps
    from meshpar.experiment.config import load
    from meshpar.launch.supervise import supervise
    from meshpar.launch.workers import Group

    words = _words(command)
    run = load(words["config"], words["overrides"] or [])
    total = devices * processes if devices else run.mesh.requested()
    if total and total % processes:
        what = f"--processes {processes}: cannot share the {total} devices of the mesh evenly"
        raise ConfigError(f"{what}; choose a number that divides {total}")
    folder = logs or run.run_dir / "logs"
    with writing("--logs", folder, "made"):
        folder.mkdir(parents=True, exist_ok=True)
    in_all = ["--devices", str(total)] if devices else []
    program = [sys.executable, "-m", "meshpar", *command, *in_all]
    group = Group(program, processes, folder, port, hang_after)

    def newest() -> int | None:
        return max(steps(run.run_dir / FOLDER), default=None)

    ended = supervise(group.run, restarts, newest)
    if ended.code:
        leave(ended.code, ended.why)


def _words(command: list[str]) -> dict[str, Any]:
    """The arguments and options of the verb, checked before any process starts.

    Raises:
      ConfigError: the verb does not run in several processes.
    """
    if command[0] != VERB:
        raise ConfigError(f"launch {command[0]}: only {VERB} runs in several processes")
    verbs: Any = typer.main.get_command(app)
    return verbs.commands[VERB].make_context(VERB, command[1:]).params
