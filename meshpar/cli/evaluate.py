"""`meshpar evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshpar.cli.app import AsJson, Devices, NoCache, Overrides, app, echo, use_cache
from meshpar.errors import ConfigError


@app.command()
def evaluate(
    source: Annotated[Path, typer.Argument(metavar="CONFIG|DIR", help="A config, a run directory or a model folder.")],
    overrides: Overrides = None,
    tasks: Annotated[
        Path, typer.Option(metavar="FILE|DIR", help="A task in lm-eval's format, or a folder of them.")
    ] = ...,  # pyright: ignore[reportArgumentType]
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first documents of each task.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples in each prompt.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Render each prompt by the model's chat template.")] = False,
    slots: Annotated[int, typer.Option(min=1, help="Requests that are computed together.")] = 8,
    max_len: Annotated[
        int | None,
        typer.Option(min=2, help="Most tokens of an input.", show_default="2048, or the model's positions"),
    ] = None,
    devices: Devices = None,
    json: AsJson = False,
    no_cache: NoCache = False,
) -> None:
    """Evaluates a trained model on tasks in lm-eval's format, in this process, on any mesh."""
    from meshpar.evaluation.evaluate import check_extra
    from meshpar.evaluation.tasks import read_tasks
    from meshpar.mesh.join import place

    if (mine := place()) is not None and mine.num_processes > 1:
        raise ConfigError(f"meshpar evaluate runs in one process, and {mine.launcher} started {mine.num_processes}")
    files = read_tasks(tasks)
    check_extra()
    from meshpar.evaluation.evaluate import evaluate as evaluated
    from meshpar.serve.source import open_source

    opened = open_source(source, overrides or [])
    opened.run.mesh.simulate(devices)
    use_cache(no_cache)
    echo(evaluated(opened, files, slots=slots, max_len=max_len, limit=limit, num_fewshot=num_fewshot, chat=chat), json)
