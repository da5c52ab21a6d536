"""`meshpar bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from meshpar.cli.app import (
    AsJson,
    Devices,
    NoCache,
    Overrides,
    Verbs,
    app,
    check_file,
    echo,
    is_first,
    use_cache,
    writing,
)
from meshpar.cli.generate import Draft, Ngrams, NumDrafts
from meshpar.cli.serve import Chunk, PageSize, Slots
from meshpar.errors import ConfigError

bench = Verbs(no_args_is_help=True, help="Measures this machine.")
app.add_typer(bench, name="bench")


SIZES = ("4KiB", "64KiB", "1MiB")
RATES = (2.0, 4.0, 8.0, 16.0, 32.0)


@bench.command()
def collectives(
    operation: Annotated[list[str] | None, typer.Option(help="A collective; can be repeated.")] = None,
    size: Annotated[list[str] | None, typer.Option(help="Bytes; can be repeated.")] = None,
    devices: Annotated[int, typer.Option(min=2, help="Number of CPU devices to simulate.")] = 8,
    json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Plot time against size: .png, .svg.")] = None,
) -> None:
    """Times every algorithm of a collective and XLA's own, beside the times that their tables predict."""
    operations = _known(operation or ["all_reduce"])
    sizes = [_bytes(text) for text in size or SIZES]
    if plot:
        _check_plot(plot)
    from meshpar.mesh import process
    from meshpar.mesh.join import join

    join()
    process.simulate(devices)
    from meshpar.collectives.bench import bench as measure

    measured = measure(operations, sizes)
    if plot and is_first():
        with writing("--plot", plot):
            measured.plot(plot)
    echo(measured, json)


@bench.command()
def serve(
    source: Annotated[Path, typer.Argument(metavar="CONFIG|DIR", help="A config, a run directory or a model folder.")],
    overrides: Overrides = None,
    rate: Annotated[list[float] | None, typer.Option(help="Requests a second; can be repeated.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests at each rate.")] = 64,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt.")] = 64,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of the longest answer.")] = 128,
    slots: Slots = 16,
    page_size: PageSize = 16,
    chunk: Chunk = 64,
    draft: Draft = None,
    ngrams: Ngrams = None,
    num_drafts: NumDrafts = 4,
    devices: Devices = None,
    no_cache: NoCache = False,
    json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Plot times against rates: .png, .svg.")] = None,
) -> None:
    """Times a server at growing request rates, and compares batches and single prompts; without HTTP."""
    if rate and min(rate) <= 0:
        raise ConfigError(f"--rate {min(rate):g}: is not above 0")
    if plot:
        _check_plot(plot)
    from meshpar.serve.source import open_source

    opened = open_source(source, overrides or [])
    if not opened.decoder:
        raise ConfigError(
            "the bench compares batches of meshpar's own decoders; a model of your own has another engine"
        )
    opened.run.mesh.simulate(devices)
    use_cache(no_cache)
    from meshpar.serve import bench as benches
    from meshpar.serve.engine import Engine
    from meshpar.serve.open_engine import open_engine

    engine = open_engine(
        opened, slots=slots, max_len=prompt + answer, page_size=page_size, chunk=chunk, max_queue=requests,
        draft=draft and open_source(draft), ngrams=ngrams, num_drafts=num_drafts,
    )  # fmt: skip
    assert isinstance(engine, Engine), "meshpar's own decoders have no other engine"
    workload = benches.draw(requests, opened.model.vocab_size, prompt, answer)
    measured = benches.bench(engine, opened, workload, sorted(rate or RATES))
    if plot:
        from meshpar.serve.plot import plot_serve

        with writing("--plot", plot):
            plot_serve(measured, plot)
    echo(measured, json)


def _known(operations: list[str]) -> list[Any]:
    from meshpar.collectives.plan import OPERATIONS
    from meshpar.errors import nearest

    for name in operations:
        if name not in OPERATIONS:
            near = nearest(name, OPERATIONS)
            fix = f"did you mean {near}? " if near else ""
            raise ConfigError(f"--operation {name}: no such collective; {fix}there are {', '.join(OPERATIONS)}")
    return operations


def _bytes(text: str) -> int:
    from meshpar.tree import parse_bytes

    try:
        return int(parse_bytes(text))
    except ValueError as error:
        raise ConfigError(f"--size {error}") from None


def _check_plot(path: Path) -> None:
    """Checks the option before anything is measured."""
    from importlib.util import find_spec

    if not find_spec("matplotlib"):
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'meshpar[plot]'")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {path}: use the suffix .png, .svg or .pdf")
    check_file("--plot", path)
