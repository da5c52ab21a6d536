"""`meshpar serve`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated

import typer

from meshpar.cli.app import Devices, NoCache, Overrides, app, use_cache
from meshpar.cli.generate import Draft, Ngrams, NumDrafts
from meshpar.errors import ConfigError

if TYPE_CHECKING:
    from meshpar.serve.source import Source

OF_DECODERS = (
    "adapter", "slots", "max_len", "page_size", "cache", "chunk", "queue", "draft", "ngrams", "num_drafts",
)  # fmt: skip
"""Options that change nothing of an encoder."""
LOCAL = ("127.0.0.1", "localhost")

Slots = Annotated[int, typer.Option(min=1, help="Requests that are decoded together.")]
MaxLen = Annotated[
    int | None,
    typer.Option(min=2, help="Most tokens of a prompt and its answer.", show_default="2048, or the model's positions"),
]
PageSize = Annotated[int, typer.Option(min=1, help="Tokens of a page of the cache.")]
Cache = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Memory of a device for keys and values.", show_default="the longest requests in all slots"
    ),
]
Chunk = Annotated[int, typer.Option(min=1, help="Tokens of a prompt that are computed between two decode steps.")]


@app.command()
def serve(
    ctx: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="CONFIG|DIR", help="A config, a run directory or a model folder.")],
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 selects a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="Name of the model.", show_default="that of the folder")] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER", help="An adapter of PEFT, which requests choose by NAME; several are allowed."
        ),
    ] = None,
    token: Annotated[
        str | None, typer.Option(envvar="MESHPAR_SERVE_TOKEN", help="Bearer token that clients must send.")
    ] = None,
    slots: Slots = 16,
    max_len: MaxLen = None,
    page_size: PageSize = 16,
    cache: Cache = None,
    chunk: Chunk = 128,
    queue: Annotated[int, typer.Option(min=1, help="Most requests in the queue; more are refused.")] = 256,
    draft: Draft = None,
    ngrams: Ngrams = None,
    num_drafts: NumDrafts = 4,
    devices: Devices = None,
    no_cache: NoCache = False,
) -> None:
    """Serves a trained model over HTTP, with OpenAI's API and a page to try it.

    It listens when its programs are compiled. At SIGTERM it refuses new requests, answers the others and exits.
    """
    _check_extra()
    from meshpar.mesh.join import place
    from meshpar.serve.http.server import bind

    if (mine := place()) is not None and mine.num_processes > 1:
        raise ConfigError(f"meshpar serve runs in one process, and {mine.launcher} started {mine.num_processes}")
    cache_bytes = _size("--cache", cache)
    with bind(host, port) as bound:
        from meshpar.serve.http.app import TextEndpoints
        from meshpar.serve.http.server import run
        from meshpar.serve.open_engine import open_engine
        from meshpar.serve.side_adapters import adapter_folders, open_adapters
        from meshpar.serve.source import open_source

        opened = open_source(source, overrides or [])
        opened.run.mesh.simulate(devices)
        use_cache(no_cache)
        name = name or source.resolve().name
        hosts = LOCAL if host in LOCAL else ("*",)
        if opened.run.model.kind == "encoder":
            _check_of_encoder(ctx, name)
            _serve_encoder(opened, name, token, hosts, bound)
            return
        adapters = open_adapters(opened, adapter_folders(adapter or [], name))
        engine = open_engine(
            opened, slots=slots, max_len=max_len, page_size=page_size, cache_bytes=cache_bytes, chunk=chunk,
            max_queue=queue, draft=draft and open_source(draft), ngrams=ngrams, num_drafts=num_drafts,
            adapters=adapters,
        )  # fmt: skip
        endpoints = TextEndpoints(engine, opened, name, token, hosts, adapters.names if adapters else ())

        run(endpoints.app(), endpoints.service, bound, partial(_say_ready, engine, bound))


def _check_of_encoder(ctx: typer.Context, name: str) -> None:
    """Raises ConfigError if an option is given that only decoders have, also with its default value."""
    sources = {one: ctx.get_parameter_source(one) for one in OF_DECODERS}
    if given := [one for one, source in sources.items() if source and source.name != "DEFAULT"]:
        options = ", ".join(f"--{one.replace('_', '-')}" for one in given)
        raise ConfigError(f"{options}: {name} is an encoder, which generates nothing; leave it out")


def _serve_encoder(source: Source, name: str, token: str | None, hosts: Sequence[str], bound: socket) -> None:
    """Serves an encoder, which has no cache and no answers that options could change."""
    from meshpar.serve.embeddings import Embedder
    from meshpar.serve.http.embeddings import EmbeddingEndpoints
    from meshpar.serve.http.server import run

    embedder = Embedder.of(source)
    endpoints = EmbeddingEndpoints(embedder, name, token, hosts)

    run(endpoints.app(), endpoints, bound, partial(_say_ready, embedder, bound))


def _say_ready(served: object, bound: socket) -> None:
    address, at, *_ = bound.getsockname()
    typer.echo(f"{served}\nlistening at http://{address}:{at}", err=True)


def _check_extra() -> None:
    """Raises ConfigError if a library that serving needs is not installed."""
    missing = [name for name in ("starlette", "uvicorn", "prometheus_client") if not find_spec(name)]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: not installed; pip install 'meshpar[serve]'")


def _size(option: str, text: str | None) -> int | None:
    """The bytes of an option."""
    from meshpar.tree import parse_bytes

    try:
        return None if text is None else int(parse_bytes(text))
    except ValueError as error:
        raise ConfigError(f"{option} {error}") from None
