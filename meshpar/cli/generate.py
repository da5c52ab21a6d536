"""`meshpar generate`."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshpar.cli.app import AsJson, Devices, Overrides, app
from meshpar.errors import ConfigError

if TYPE_CHECKING:
    from meshpar.serve.generator import Piece


@app.command()
def generate(
    source: Annotated[Path, typer.Argument(metavar="CONFIG|DIR", help="A config, or a run's folder.")],
    overrides: Overrides = None,
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="May be given several times.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A prompt a line; in a .jsonl file each a JSON text.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k most probable.", show_default="all")] = None,
    top_p: Annotated[float, typer.Option(help="Draw from the most probable of this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Ends an answer before it.")] = None,
    devices: Devices = None,
    json: AsJson = False,
) -> None:
    """Goes on from prompts, all in one batch, with the latest checkpoint of a run, on any mesh.

    An answer is written as it comes, those to later prompts below those to earlier ones; what it took goes to stderr.
    """
    texts = [*(prompt or []), *_lines(prompts)]
    if not texts:
        raise ConfigError("there is no prompt: give --prompt TEXT or --prompts FILE")
    from meshpar.experiment.config import simulate
    from meshpar.serve.generate import generate as generated
    from meshpar.serve.source import open_source

    opened = open_source(source, overrides or [])
    simulate(opened.run, devices)
    told = generated(
        opened, texts, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
        stop=stop or [], show=(lambda piece: None) if json else Terminal(texts).show,
    )  # fmt: skip
    if json:
        typer.echo(json_format.dumps(told.as_json(), indent=2))
    else:
        typer.echo(str(told), err=True)


class Terminal:
    """Writes prompts and answers one below the other, as they come: one whose turn it is not yet waits."""

    def __init__(self, prompts: list[str]):
        self.row, self.waiting, self.finished = 0, list(prompts), [False] * len(prompts)

    def show(self, piece: Piece) -> None:
        self.waiting[piece.row] += piece.text
        self.finished[piece.row] = piece.finish is not None
        while self.row < len(self.waiting):
            typer.echo(self.waiting[self.row], nl=False)
            self.waiting[self.row] = ""
            if not self.finished[self.row]:
                return
            self.row += 1
            typer.echo("\n" * (1 + (self.row < len(self.waiting))), nl=False)


def _lines(path: Path | None) -> list[str]:
    """The prompts of a file."""
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        texts = [json_format.loads(line) for line in lines] if path.suffix == ".jsonl" else lines
    except OSError as error:
        raise ConfigError(f"--prompts {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # no UTF-8, or no JSON
        raise ConfigError(f"--prompts {path}: {error}") from None
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise ConfigError(f"--prompts {path}:{number}: is no JSON text in quotes")
    return texts
