"""`meshpar plan`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from meshpar.cli.app import AsJson, Overrides, app, check_file, echo, origin, write
from meshpar.errors import ConfigError
from meshpar.progress import busy


@app.command()
def plan(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="MACHINE",
            help="v5e:4x4, h100:4x8, h100:4x8+a100:4x8, or a file of a machine.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    fix: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A part of the layout that is given: mesh.tensor=8.")
    ] = None,
    at_most: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes that a device may hold, as in 60GiB.", show_default="94 %")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(metavar="ROWS", min=1, help="Rows of a batch, in place of data.batch_size.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Write the config of the fastest layout.")
    ] = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Only layouts that no other beats in both time and memory.")
    ] = False,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Compile the best five for MACHINE, and drop those that do not fit.")
    ] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the plan as a web page.")] = None,
    tokens: Annotated[
        float | None, typer.Option(metavar="NUMBER", min=1, help="Say the device-hours of so many tokens: 15e12.")
    ] = None,
    price: Annotated[
        str | None, typer.Option(metavar="PRICE", help="Money for an hour of a device: '2.50 USD'. Needs --tokens.")
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Predict what others measured and published, in place of a plan.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Finds the layout of CONFIG on a machine that is fastest and fits, and says why the others lose.

    It considers the sizes of all axes, ZeRO's stages, schedules of pipelines and the hosts of their stages,
    microbatches, remat and overlap. The estimates are made from traced steps: without --compile nothing is compiled,
    nothing is run, and no devices are needed.

    --published compares the estimates with measurements of others instead, row by row; it takes two minutes.
    """
    if published:
        others = [config, target, overrides, fix, at_most, global_batch, out, pareto, compile_, html, tokens, price]
        if any(others):
            raise ConfigError("--published takes no config and no other option but --json: its rows have their own")
        from meshpar.planning.published import compare

        with busy("tracing published layouts", quiet=True):
            compared = compare()
        echo(compared, json)
        compared.check()
        return
    if config is None or target is None:
        missing = " and ".join(
            name for name, value in {"CONFIG": config, "--target MACHINE": target}.items() if value is None
        )
        raise ConfigError(f"plan needs {missing}, as in meshpar plan configs/quickstart.yaml --target h100:1x8")
    from meshpar.experiment.config import load
    from meshpar.mesh import process
    from meshpar.planning.measured import MeasuredMachine
    from meshpar.planning.plan import plan as find

    if out:
        check_file("--write", out)
    if html:
        check_file("--html", html)
    given = overrides or []
    if global_batch:
        if any(one.startswith("data.batch_size=") for one in given):
            raise ConfigError(f"--global-batch {global_batch}: data.batch_size is given, too; keep one of the two")
        given = [*given, f"data.batch_size={global_batch}"]
    loaded = load(config, given)
    with busy("tracing layouts", quiet=True):
        found = find(loaded, target, fix=fix or (), at_most=at_most, pareto=pareto, tokens=tokens, price=price)
    if compile_:
        if isinstance(found.machine, MeasuredMachine):
            process.simulate(found.machine.num_devices)
        with busy(f"compiling for {target}", quiet=True):
            found = found.compile()
    if out:
        write("--write", out, found.yaml())
    if html:
        from meshpar.planning.page import page

        command = shlex.join(["meshpar", "train", str(config), *given])
        write("--html", html, page(found, origin(), command))
    echo(found, json)
