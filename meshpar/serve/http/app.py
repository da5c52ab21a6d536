"""The endpoints of a server, as an ASGI application."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from meshpar.data.chat.template import ChatTemplate, read_template
from meshpar.data.special_tokens import NEUTRAL, SamplingDefaults, sampling_defaults
from meshpar.data.tokenizer import TokenizerFile
from meshpar.errors import ConfigError
from meshpar.serve.constraint import Grammar, Grammars
from meshpar.serve.engine import Engine
from meshpar.serve.http.bodies import MOST_ANSWERS, CompletionBody, RequestBody, parse
from meshpar.serve.http.chat import encode_chat
from meshpar.serve.http.chat_bodies import ChatBody
from meshpar.serve.http.errors import HANDLERS, ApiError
from meshpar.serve.http.logprobs import Texts
from meshpar.serve.http.metrics import Metrics
from meshpar.serve.http.replies import EventStream, complete, usage
from meshpar.serve.http.shapes import ChatShape, CompletionShape, Shape, Toolbox
from meshpar.serve.http.tools import form_of
from meshpar.serve.scheduler import Request
from meshpar.serve.service import Service
from meshpar.serve.source import Source

PAGE = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js"}
"""Path -> the file of the page in the folder `page`."""
LARGEST_BODY = 2**22
"""The largest body of a request, in bytes."""


@dataclass(frozen=True)
class Endpoints:
    """Answers HTTP requests.

    Args:
      service: computes the answers.
      source: the model and its tokenizer.
      name: the name of the model.
      vocab_size: the ids of the model are below it.
      template: the chat template; None if the model has none.
      default: how tokens are sampled if a request does not say it.
      token: the bearer token that clients must send; None if there is none.
      adapters: the names of the adapters that requests can choose as their model.
      scores_prompts: whether the engine computes log-probabilities of prompts.
      hosts: the values of the header Host that are accepted. A page of another site whose name was made to resolve to
        this address sends another one (DNS rebinding).
    """

    service: Service
    metrics: Metrics
    source: Source
    name: str
    vocab_size: int
    template: ChatTemplate | None = None
    default: SamplingDefaults = NEUTRAL
    token: str | None = None
    hosts: Sequence[str] = ("*",)
    scores_prompts: bool = True
    adapters: Sequence[str] = ()

    @cached_property
    def grammars(self) -> Grammars:
        """Reads the grammars of requests."""
        return Grammars(self.source.tokenizer, self.vocab_size, self.source.ends)

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.one_model),
            Route("/health", self.health),
            Route("/metrics", self.prometheus),
            *(Route(path, self.page) for path in PAGE),
        ]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=self.hosts)
        return Starlette(routes=routes, middleware=[hosts], exception_handlers=HANDLERS, lifespan=self._lifespan)

    async def completions(self, http: HttpRequest) -> Response:
        """`/v1/completions`."""
        self._authorize(http)
        body = parse(CompletionBody, await body_of(http))
        encode = partial(self.source.encode, parse_special=body.parse_special)
        prompts = await asyncio.to_thread(lambda: [encode(x) if isinstance(x, str) else x for x in body.prompt])
        texts = [x if isinstance(x, str) else None for x in body.prompt]
        shape = CompletionShape(
            body.model or self.name, Texts(self.source.tokenizer, body.num_ranked), body.echoes, texts
        )
        return await self._answer(http, body, prompts, shape, body.max_tokens)

    async def chat(self, http: HttpRequest) -> Response:
        """`/v1/chat/completions`."""
        self._authorize(http)
        body = parse(ChatBody, await body_of(http))
        tokenizer = self.source.tokenizer
        if self.template is None or not isinstance(tokenizer, TokenizerFile):
            raise ApiError(400, f"{self.name} has no chat template; use /v1/completions", code="no_chat_template")
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        options = body.chat_template_kwargs
        if unread := self.template.unread(options or ()):
            what = f"chat_template_kwargs: {', '.join(unread)[:100]}: changes nothing in the model's template"
            raise ApiError(400, f"{what}; leave it out", "chat_template_kwargs")
        toolbox, grammar = await asyncio.to_thread(self._toolbox, body, self.template, tokenizer)
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if toolbox else None
        prompt = await asyncio.to_thread(encode_chat, tokenizer, self.template, messages, tools=tools, options=options)
        max_tokens = body.max_completion_tokens or body.max_tokens
        shape = ChatShape(body.model or self.name, Texts(tokenizer, body.num_ranked), toolbox)
        return await self._answer(http, body, [prompt], shape, max_tokens, grammar)

    def _toolbox(
        self, body: ChatBody, template: ChatTemplate, tokenizer: TokenizerFile
    ) -> tuple[Toolbox | None, Grammar | None]:
        """The tools that an answer may call, and its grammar if it must call one, or if one is strict."""
        tools = [tool.function.model_dump(exclude_none=True) for tool in body.callable]
        if not tools:
            return None, None
        form = form_of(template)
        if form is None:
            what = "tools: the model's chat template renders no tools, or writes calls in a form that is not known"
            raise ApiError(400, f"{what}; leave them out", "tools")
        ids = {token: tokenizer.id_of(token) for token in tokenizer.special_tokens}
        special = {token: index for token, index in ids.items() if index is not None and token in form.marks}
        grammar = None
        if body.limits_calls:
            of_tools = form.grammar if body.must_call else form.grammar_of_text
            with _named("tool_choice" if body.must_call else "tools"):
                grammar = self.grammars.of_lark(of_tools(tools, special))
        names = tuple(tool["name"] for tool in tools)
        return Toolbox(form, names, body.parallel_tool_calls is not False, frozenset(special.values())), grammar

    async def embeddings(self, http: HttpRequest) -> Response:
        """`/v1/embeddings`, which only an encoder answers, see `http.embeddings`."""
        self._authorize(http)
        what = f"{self.name} generates text, and says nowhere how a text's vector is made of its tokens"
        raise ApiError(400, f"{what}; serve an encoder: BERT, RoBERTa or ModernBERT", code="no_embeddings")

    async def models(self, http: HttpRequest) -> Response:
        """`/v1/models`."""
        self._authorize(http)
        return JSONResponse({"object": "list", "data": self._models})

    async def one_model(self, http: HttpRequest) -> Response:
        """`/v1/models/NAME`."""
        self._authorize(http)
        name = http.path_params["name"]
        if found := [model for model in self._models if model["id"] == name]:
            return JSONResponse(found[0])
        raise self._no_model(name)

    @property
    def _models(self) -> list[dict[str, Any]]:
        about = {"object": "model", "created": 0, "owned_by": "meshpar"}
        adapters = [{"id": name, **about, "parent": self.name} for name in self.adapters]
        return [{"id": self.name, **about}, *adapters]

    def _no_model(self, name: str) -> ApiError:
        known = ", ".join(repr(model["id"]) for model in self._models)
        return ApiError(404, f"there is no model {name[:100]!r}, only {known}", "model", "model_not_found")

    async def health(self, http: HttpRequest) -> Response:
        """`/health`: whether requests are accepted, and how many slots and pages are used."""
        service = self.service
        scheduler = service.scheduler
        pages = [
            {"held": pool.num_held, "reusable": pool.num_reusable, "all": pool.num_pages} for pool in scheduler.pools
        ]
        running = sum(row is not None for row in scheduler.rows)
        slots = {"running": running, "all": len(scheduler.rows), "queued": len(scheduler.queue)}
        state = {"status": service.status, "model": self.name, "slots": slots, "pages": pages}
        return JSONResponse(state, 200 if service.status == "ok" else 503)

    async def prometheus(self, http: HttpRequest) -> Response:
        """`/metrics`."""
        self._authorize(http)
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def page(self, http: HttpRequest) -> Response:
        """`/`, a page to try the server."""
        return FileResponse(Path(__file__).parent / "page" / PAGE[http.url.path])

    # How a request is answered --------------------------------------------------------------------------------------

    async def _answer(
        self, http: HttpRequest, body: RequestBody, prompts: Sequence[Sequence[int]], shape: Shape,
        max_tokens: int | None, grammar: Grammar | None = None,
    ) -> Response:  # fmt: skip
        if body.model not in (None, self.name, *self.adapters):
            raise self._no_model(body.model)
        grammar = grammar or await asyncio.to_thread(self._grammar, body)
        requests = self._requests(body, prompts, max_tokens, grammar)
        answers = self.service.submit(requests, body.stop, body.n or 1, body.stop_token_ids or ())
        if body.stream:
            return EventStream(
                answers, shape, with_usage=bool(body.stream_options and body.stream_options.include_usage)
            )
        await complete(http, answers)
        return JSONResponse(shape.response(answers) | {"usage": usage(answers)})

    def _grammar(self, body: RequestBody) -> Grammar | None:
        """What the answer follows, if the request says so."""
        with _named("structured_outputs" if body.structured_outputs else "response_format"):
            return body.grammar(self.grammars)

    def _requests(
        self, body: RequestBody, prompts: Sequence[Sequence[int]], max_tokens: int | None, grammar: Grammar | None
    ) -> list[Request]:
        num_answers = body.n or 1
        most = min(MOST_ANSWERS, self.service.scheduler.capacity.max_queue)
        if not 0 < len(prompts) * num_answers <= most:
            what = f"{len(prompts)} prompts with n = {num_answers}: a request has 1 to {most} answers"
            raise ApiError(400, what, "n")
        adapter = (self.name, *self.adapters).index(body.model or self.name)
        sampling, adjustment, scores = (
            body.sampling(self.default),
            body.adjustment(self.default),
            body.num_ranked is not None,
        )
        if scores and body.echoes and not self.scores_prompts:
            raise ApiError(
                400, "echo: this server computes no log-probabilities of prompts; leave out logprobs", "echo"
            )
        for key, tokens in {"logit_bias": adjustment.bias, "stop_token_ids": body.stop_token_ids or ()}.items():
            if outside := [token for token in tokens if token >= self.vocab_size]:
                what = f"{key}: {outside[0]} is outside of the model's vocabulary of {self.vocab_size}"
                raise ApiError(400, what, key)
        repeated = [prompt for prompt in prompts for _ in range(num_answers)]
        longest = [self._max_tokens(prompt, max_tokens) for prompt in repeated]
        return [
            Request(
                prompt=prompt,
                max_tokens=most or 1,
                sampling=sampling,
                index=i,
                adjustment=adjustment,
                constraint=grammar and grammar.constraint(),
                is_scored_only=most == 0,
                scores=scores,
                scores_prompt=scores and body.echoes,
                adapter=adapter,
            )
            for i, (prompt, most) in enumerate(zip(repeated, longest, strict=True))
        ]

    def _max_tokens(self, prompt: Sequence[int], max_tokens: int | None) -> int:
        """Checks a prompt. Returns the largest number of tokens of its answer, by default as many as fit."""
        vocab_size = self.vocab_size
        longest = self.service.scheduler.capacity.max_len
        if not prompt:
            raise ApiError(400, "prompt: is empty; write at least one character", "prompt")
        if not all(0 <= token < vocab_size for token in prompt):
            raise ApiError(400, f"prompt: has ids outside of the model's vocabulary of {vocab_size}", "prompt")
        max_tokens = max(1, longest - len(prompt)) if max_tokens is None else max_tokens
        if len(prompt) + (max_tokens or 1) > longest:
            what = (
                f"{len(prompt)} tokens and {max_tokens or 1} more do not fit {longest}, the longest row of this server"
            )
            raise ApiError(400, what, "prompt", "context_length_exceeded")
        return max_tokens

    def _authorize(self, http: HttpRequest) -> None:
        authorize(http, self.token)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        running = asyncio.create_task(self.service.run())
        yield
        running.cancel()
        with suppress(asyncio.CancelledError, Exception):  # if it failed, its clients have received an error
            await running


def endpoints_of(
    engine: Engine, source: Source, name: str, token: str | None = None, hosts: Sequence[str] = ("*",),
    adapters: Sequence[str] = (),
) -> Endpoints:  # fmt: skip
    """The endpoints of a model whose programs are compiled.

    Args:
      adapters: see `OpenedAdapters.names`.

    Raises:
      DataError: the chat template cannot be read.
    """
    metrics = Metrics()
    service = Service(engine, engine.decoding.capacity, source.tokenizer, metrics, source.ends)
    metrics.watch(service.scheduler)
    template = read_template(source.folder) if source.folder else None
    default = sampling_defaults(source.folder) if source.folder else NEUTRAL
    of_prompts = engine.decoding.scores_prompts
    return Endpoints(
        service,
        metrics,
        source,
        name,
        engine.decoding.vocab_size,
        template,
        default,
        token,
        hosts,
        of_prompts,
        adapters,
    )


@contextmanager
def _named(key: str) -> Iterator[None]:
    """Names the key of a request in an error of its grammar."""
    try:
        yield
    except ConfigError as error:
        raise ApiError(400, f"{key}: {error}", key) from None


def authorize(http: HttpRequest, token: str | None) -> None:
    """Refuses a request without the bearer token, if there is one."""
    if token is None:
        return
    sent = http.headers.get("authorization", "").encode("utf-8", "surrogateescape")
    if not hmac.compare_digest(sent, f"Bearer {token}".encode()):
        raise ApiError(401, "the header Authorization: Bearer TOKEN is missing or wrong", code="invalid_api_key")


async def body_of(http: HttpRequest) -> bytes:
    """The body of a request, which must be JSON.

    A browser sends JSON to another site only if that site allows it in a preflight request. This server does not, so
    pages of other sites cannot use it.
    """
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(400, "the header Content-Type must be application/json")
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > LARGEST_BODY:
            raise ApiError(413, f"the body is larger than {LARGEST_BODY} bytes")
    return bytes(body)
