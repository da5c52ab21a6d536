"""`meshpar inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshpar.cli.app import AsJson, ConfigFile, Devices, Overrides, app, check_file, echo, is_first, origin, write
from meshpar.errors import ConfigError
from meshpar.progress import busy

if TYPE_CHECKING:
    from meshpar.inspection.difference import Difference
    from meshpar.inspection.fit import FitReport
    from meshpar.inspection.inspect import Inspection


@app.command()
def inspect(
    config: ConfigFile,
    overrides: Overrides = None,
    devices: Devices = None,
    json: AsJson = False,
    target: Annotated[
        str | None, typer.Option(metavar="MACHINE", help="Compile for v5e:4x4, v5p:4x4x4, h100:4x8, ...")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the program as a web page.")] = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="Compare two steps: --diff A [KEY=VALUE]... B [KEY=VALUE]...")
    ] = False,
) -> None:
    """Compiles the step of CONFIG and reports its communication, FLOPs and memory on a device. Does not train.

    With --diff, reports the changes from A to B. Each is a config, followed by its KEY=VALUEs, or a file written by
    --json.
    """
    if html and diff:
        raise ConfigError("--html draws one program, --diff compares two: use one of them")
    if html:
        check_file("--html", html)
    if target is None:
        from meshpar.mesh.join import join

        join()
    if diff:
        with busy("compiling two steps", quiet=True):
            report = _difference([str(config), *(overrides or [])], devices, target)
    else:
        with busy("compiling the step" if target is None else f"compiling the step for {target}", quiet=True):
            report = _inspection(config, overrides or [], devices, target)
    if html and is_first():
        from meshpar.config import to_yaml
        from meshpar.experiment.config import load
        from meshpar.inspection.report.page import page

        write("--html", html, page(report.as_json(), origin(), to_yaml(load(config, overrides or []))))
    echo(report, json)


def _inspection(config: Path, overrides: list[str], devices: int | None, target: str | None) -> Inspection | FitReport:
    from meshpar.experiment import actions
    from meshpar.experiment.config import load

    loaded = load(config, overrides)
    if target is None:
        loaded.mesh.simulate(devices)
    return actions.inspect(loaded, target)


def _difference(words: list[str], devices: int | None, target: str | None) -> Difference:
    from meshpar.experiment import actions
    from meshpar.experiment.config import Run, load
    from meshpar.inspection.difference import difference
    from meshpar.inspection.report.plain import read

    sides = [read(path) if path.suffix == ".json" else load(path, changes) for path, changes in _two(words)]
    configs = [side for side in sides if isinstance(side, Run)]
    if configs and target is None:  # the number of simulated devices can be set only once
        configs[0].mesh.simulate(devices or max(config.mesh.requested() or 1 for config in configs))
    before, after = (
        actions.inspect(side, target, devices or side.mesh.requested()).as_json() if isinstance(side, Run) else side
        for side in sides
    )
    return difference(before, after)


def _two(words: list[str]) -> list[tuple[Path, list[str]]]:
    """The two files of a comparison, each with the overrides that follow it."""
    sides: list[tuple[Path, list[str]]] = []
    for word in words:
        if sides and "=" in word:
            sides[-1][1].append(word)
        else:
            sides.append((Path(word), []))
    if len(sides) != 2:
        raise ConfigError(f"--diff compares two programs, got {' and '.join(str(path) for path, _ in sides)}")
    for path, changes in sides:
        if path.suffix == ".json" and changes:
            raise ConfigError(f"{path} holds a compiled program, which {changes[0]} cannot change")
    return sides
