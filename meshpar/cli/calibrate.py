"""`meshpar calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshpar.cli.app import app, check_file, write
from meshpar.errors import ConfigError
from meshpar.progress import busy


@app.command()
def calibrate(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write, such as here.yaml.")],
    devices: Annotated[int, typer.Option(min=1, max=256, help="Number of CPU devices to simulate.")] = 8,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE.")] = False,
) -> None:
    """Measures this machine, so that `meshpar plan --target FILE` plans for it.

    Of CPUs, products, elementwise operations and every kind of collective are timed by size, on all devices at once. Of
    accelerators, products by shape, attention, memory, launches and the links between them.
    """
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{out}: give the file the suffix .yaml")
    if out.exists() and not overwrite:
        raise ConfigError(f"{out} exists: use --overwrite to replace it, or another name")
    check_file("FILE", out)
    from meshpar.config import to_yaml
    from meshpar.mesh import process

    process.simulate(devices)
    import jax

    if jax.default_backend() != "cpu":
        from meshpar.planning.calibrate_chip import calibrate_chip

        with busy("measuring", quiet=True):
            chip = calibrate_chip()
        write("FILE", out, chip.yaml())
        typer.echo("\n".join([f"{chip.text}: {out}", *chip.lines[1:]]))
        return
    from meshpar.planning.calibrate import calibrate as measure

    with busy("measuring", quiet=True):
        machine = measure()
    cores = " Simulated devices share cores: times are CPU seconds over cores." if machine.shares_cores else ""
    write("FILE", out, f"# {machine.text} by `meshpar calibrate`.{cores}\n{to_yaml(machine)}")
    typer.echo(f"{machine.text}: {out}")
