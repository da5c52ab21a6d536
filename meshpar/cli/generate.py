"""`meshpar generate`."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshpar.cli.app import AsJson, Devices, NoCache, Overrides, app, echo, is_first, use_cache
from meshpar.errors import ConfigError

if TYPE_CHECKING:
    from meshpar.serve.answer import AnswerPiece

Draft = Annotated[Path | None, typer.Option(metavar="RUN", help="A smaller model that drafts tokens.")]
Ngrams = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Draft the tokens that followed the last N tokens earlier.")
]
NumDrafts = Annotated[int, typer.Option(min=1, help="Tokens drafted at a time.")]


@app.command()
def generate(
    source: Annotated[Path, typer.Argument(metavar="CONFIG|DIR", help="A config, or a run directory.")],
    overrides: Overrides = None,
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="A prompt; can be repeated.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts, one per line (JSON in .jsonl).")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum length of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 selects the most probable token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k best tokens.", show_default="all")] = None,
    top_p: Annotated[float, typer.Option(help="Sample from the best tokens with this total probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End an answer before TEXT; can be repeated.")
    ] = None,
    no_parse_special: Annotated[
        bool, typer.Option("--no-parse-special", help="Take <s> in a prompt as its characters, not as a special token.")
    ] = False,
    draft: Draft = None,
    ngrams: Ngrams = None,
    num_drafts: NumDrafts = 4,
    devices: Devices = None,
    json: AsJson = False,
    no_cache: NoCache = False,
) -> None:
    """Completes prompts, all in one batch, with the latest checkpoint of a run, on any mesh.

    Answers are printed while they are generated, in the order of their prompts. Time and memory are printed to stderr.
    """
    texts = [*(prompt or []), *_lines(prompts)]
    if not texts:
        raise ConfigError("there is no prompt: use --prompt TEXT or --prompts FILE")
    from meshpar.mesh.join import join
    from meshpar.serve.generate import generate as generated
    from meshpar.serve.source import open_source

    opened = open_source(source, overrides or [])
    join()
    opened.run.mesh.simulate(devices)
    use_cache(no_cache)
    result = generated(
        opened, texts, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
        stop=stop or [], draft=draft, ngrams=ngrams, num_drafts=num_drafts, parse_special=not no_parse_special,
        show=Terminal(texts).show if is_first() and not json else (lambda piece: None),
    )  # fmt: skip
    echo(result, json, err=not json)


class Terminal:
    """Prints prompts and answers in order, while they are generated. Text of a later row waits for earlier rows."""

    def __init__(self, prompts: list[str]):
        self.row = 0
        self.waiting = list(prompts)
        self.finished = [False] * len(prompts)

    def show(self, piece: AnswerPiece) -> None:
        self.waiting[piece.row] += piece.text
        self.finished[piece.row] = piece.finish is not None
        while self.row < len(self.waiting):
            typer.echo(self.waiting[self.row], nl=False)
            self.waiting[self.row] = ""
            if not self.finished[self.row]:
                return
            self.row += 1
            typer.echo("\n" if self.row < len(self.waiting) else "")


def _lines(path: Path | None) -> list[str]:
    """The prompts of a file."""
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        texts = [json_format.loads(line) for line in lines] if path.suffix == ".jsonl" else lines
    except OSError as error:
        raise ConfigError(f"--prompts {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise ConfigError(f"--prompts {path}: {error}") from None
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise ConfigError(f"--prompts {path}:{number}: is not a JSON string")
    return texts
