"""The command line: verbs over a config file. Bad input ends with a message and exit code 2."""

from __future__ import annotations

import json as json_format
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshpar.errors import ConfigError, MeshparError

if TYPE_CHECKING:  # a misspelt key is told before anything heavy is imported
    from meshpar.inspection.difference import Difference
    from meshpar.inspection.inspect import Inspection
    from meshpar.plan.fit import Judgement

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False)]
Devices = Annotated[
    int | None, typer.Option(min=1, help="Simulate so many CPU devices.", show_default="as many as the mesh has")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.callback()
def _meshpar() -> None:
    """Declare a mesh and a name for each dim; train on any layout of devices, with the same numbers."""


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    devices: Devices = None,
    json: AsJson = False,
    profile: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a trace of a few steps there.")] = None,
    dump_hlo: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the compiled step's text there.")] = None,
) -> None:
    """Trains the model of CONFIG, or goes on from the last checkpoint in its run directory."""
    from meshpar import run

    loaded = run.load(config, overrides or [])
    run.simulate(loaded, devices)
    run.fit(loaded, json=json, profile=profile, dump_hlo=dump_hlo)


@app.command()
def explain(
    config: ConfigFile,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[PATH] [KEY=VALUE]...", show_default=False)] = None,
    devices: Devices = None,
    json: AsJson = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the arrays there.")] = None,
) -> None:
    """Says for every parameter: dims, rules, spec, local shape, bytes a device. Needs no devices.

    With PATH (a glob such as `blocks.*.kernel`) also draws how those arrays lie on the mesh.
    """
    from meshpar import run

    paths = [a for a in arguments or [] if "=" not in a]
    loaded = run.load(config, [a for a in arguments or [] if "=" in a])
    if len(paths) > 1:
        raise ConfigError(f"explain takes one PATH, got {' and '.join(paths)}")
    told = run.explain(loaded, paths[0] if paths else None, devices)
    if svg:
        _write("--svg", svg, told.svg())
    typer.echo(json_format.dumps(told.as_json(), indent=2) if json else str(told))


@app.command()
def inspect(
    config: ConfigFile,
    overrides: Overrides = None,
    devices: Devices = None,
    json: AsJson = False,
    target: Annotated[
        str | None, typer.Option(metavar="MACHINE", help="Compile for v5e:4x4, v5p:4x4x4, h100:4x8, ...")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the program there, as a web page.")] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Compare two: --diff A [KEY=VALUE]... B [KEY=VALUE]...")] = False,
) -> None:
    """Compiles the step of CONFIG and says what a device sends, computes and holds in it. Trains nothing.

    With --diff, says what changes from A to B. Each is a config, with the KEY=VALUEs after it, or a file that --json
    wrote.
    """
    _check_html(html, diff)
    if diff:
        told = _difference([str(config), *(overrides or [])], devices, target)
    else:
        told = _inspection(config, overrides or [], devices, target)
        _draw(told, html)
    typer.echo(json_format.dumps(told.as_json(), indent=2) if json else str(told))


def _inspection(config: Path, overrides: list[str], devices: int | None, target: str | None) -> Inspection | Judgement:
    from meshpar import run

    loaded = run.load(config, overrides)
    if target is None:
        run.simulate(loaded, devices)
    return run.inspect(loaded, target)


def _difference(words: list[str], devices: int | None, target: str | None) -> Difference:
    from meshpar import run
    from meshpar.inspection.difference import difference
    from meshpar.inspection.plain import read

    sides = [read(path) if path.suffix == ".json" else run.load(path, changes) for path, changes in _two(words)]
    configs = [side for side in sides if isinstance(side, run.Run)]
    if configs and target is None:  # JAX can be told only once how many devices to simulate
        run.simulate(configs[0], devices or max(config.mesh.requested() or 1 for config in configs))
    before, after = (
        run.inspect(side, target, devices or side.mesh.requested()).as_json() if isinstance(side, run.Run) else side
        for side in sides
    )
    return difference(before, after)


def _two(words: list[str]) -> list[tuple[Path, list[str]]]:
    """The two files of a comparison, each with the changes that stand behind it."""
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
            raise ConfigError(f"{path} holds a program that was compiled: {changes[0]} cannot change it")
    return sides


def _check_html(html: Path | None, diff: bool) -> None:
    """Before anything is compiled, which can take minutes."""
    if html and diff:
        raise ConfigError("--html draws one program, --diff compares two: use one of them")
    if html and not html.parent.is_dir():
        raise ConfigError(f"--html {html}: there is no folder {html.parent}")


def _draw(told: Inspection | Judgement, html: Path | None) -> None:
    from meshpar.inspection.page import page

    if html:
        _write("--html", html, page(told.as_json()))


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from None


@app.command()
def prove(config: ConfigFile, overrides: Overrides = None, json: AsJson = False) -> None:
    """Proves that CONFIG, made small, computes on its mesh what it does on one device; or says which axis is guilty."""
    from meshpar import run
    from meshpar.mesh import process
    from meshpar.proof import prove as proof
    from meshpar.proof.shrink import shrink

    loaded = run.load(config, overrides or [])
    process.simulate(shrink(loaded).mesh.requested() or 1)
    told = proof.prove(loaded)
    typer.echo(json_format.dumps(told.as_json(), indent=2) if json else str(told))
    raise typer.Exit(0 if told.is_equal else 1)


@app.command()
def schema() -> None:
    """Prints the JSON schema of a config file, for editors."""
    from meshpar import config, run

    typer.echo(json_format.dumps(config.schema(run.Run), indent=2))


def main() -> None:
    """The entry point: 0, 1 for a failed run, 2 for bad input."""
    try:
        app()
    except MeshparError as error:
        typer.echo(f"meshpar: {error}", err=True)
        sys.exit(2)
