"""The endpoints of a model that generates text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from meshpar.data.chat.template import ChatTemplate, read_template
from meshpar.data.special_tokens import NEUTRAL, sampling_defaults
from meshpar.data.tokenizer import TokenizerFile
from meshpar.errors import ConfigError
from meshpar.serve.constraint import Grammar, Grammars
from meshpar.serve.engine import Engine
from meshpar.serve.http.bodies import MOST_ANSWERS, CompletionBody, RequestBody, parse
from meshpar.serve.http.chat import encode_chat
from meshpar.serve.http.chat_bodies import ChatBody
from meshpar.serve.http.endpoints import Endpoints, body_of
from meshpar.serve.http.errors import ApiError
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


class TextEndpoints(Endpoints):
    """Answers HTTP requests with text.

    Args:
      engine: computes the answers.
      source: the model and its tokenizer.
      others: see `Endpoints`.

    Raises:
      DataError: the chat template cannot be read.
    """

    def __init__(self, engine: Engine, source: Source, *others: Any, **more: Any):
        super().__init__(*others, **more)
        self.source = source
        self.decoding = engine.decoding
        self.metrics = Metrics()
        self.service = Service(engine, source.tokenizer, self.metrics, source.ends)
        self.metrics.watch(self.service.scheduler)
        self.template = read_template(source.folder) if source.folder else None
        self.default = sampling_defaults(source.folder) if source.folder else NEUTRAL

    @cached_property
    def grammars(self) -> Grammars:
        """Reads the grammars of requests."""
        return Grammars(self.source.tokenizer, self.decoding.vocab_size, self.source.ends)

    @property
    def routes(self) -> list[Route]:
        return [
            self.guarded("/v1/completions", self.completions, ["POST"]),
            self.guarded("/v1/chat/completions", self.chat, ["POST"]),
            self.guarded("/v1/embeddings", self.embeddings, ["POST"]),
            self.guarded("/metrics", self.prometheus),
            *(Route(path, self.page) for path in PAGE),
        ]

    async def completions(self, http: HttpRequest) -> Response:
        """`/v1/completions`."""
        body = parse(CompletionBody, await body_of(http))
        encode = partial(self.source.encode, parse_special=body.parse_special)
        prompts = await asyncio.to_thread(lambda: [encode(x) if isinstance(x, str) else x for x in body.prompt])
        texts = [x if isinstance(x, str) else None for x in body.prompt]
        ranked = Texts(self.source.tokenizer, body.num_ranked)
        shape = CompletionShape(body.model or self.name, ranked, body.echoes, texts)
        return await self._answer(http, body, prompts, shape, body.max_tokens)

    async def chat(self, http: HttpRequest) -> Response:
        """`/v1/chat/completions`."""
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
        what = f"{self.name} generates text, and says nowhere how a text's vector is made of its tokens"
        raise ApiError(400, f"{what}; serve an encoder: BERT, RoBERTa or ModernBERT", code="no_embeddings")

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
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def page(self, http: HttpRequest) -> Response:
        """`/`, a page to try the server."""
        return FileResponse(Path(__file__).parent / "page" / PAGE[http.url.path])

    # How a request is answered --------------------------------------------------------------------------------------

    async def _answer(
        self, http: HttpRequest, body: RequestBody, prompts: Sequence[Sequence[int]], shape: Shape,
        max_tokens: int | None, grammar: Grammar | None = None,
    ) -> Response:  # fmt: skip
        self.check_model(body.model)
        grammar = grammar or await asyncio.to_thread(self._grammar, body)
        requests = self._requests(body, prompts, max_tokens, grammar)
        answers = self.service.submit(requests, body.stop, body.n or 1, body.stop_token_ids or (), shape.kept)
        if body.stream:
            with_usage = bool(body.stream_options and body.stream_options.include_usage)
            return EventStream(answers, shape, with_usage)
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
        adjustment, scores = body.adjustment(self.default), body.num_ranked is not None
        if scores and body.echoes and not self.decoding.scores_prompts:
            what = "echo: this server computes no log-probabilities of prompts; leave out logprobs"
            raise ApiError(400, what, "echo")
        vocab_size = self.decoding.vocab_size
        for key, tokens in {"logit_bias": adjustment.bias, "stop_token_ids": body.stop_token_ids or ()}.items():
            if outside := [token for token in tokens if token >= vocab_size]:
                what = f"{key}: {outside[0]} is outside of the model's vocabulary of {vocab_size}"
                raise ApiError(400, what, key)
        repeated = [prompt for prompt in prompts for _ in range(num_answers)]
        longest = [self._max_tokens(prompt, max_tokens) for prompt in repeated]
        constraints = [grammar and grammar.constraint() for _ in repeated]
        adapter = (self.name, *self.adapters).index(body.model or self.name)
        each: dict[str, Any] = {"sampling": body.sampling(self.default), "adjustment": adjustment, "adapter": adapter}
        each |= {"scores": scores, "scores_prompt": scores and body.echoes}
        return [
            Request(prompt=prompt, max_tokens=n, index=i, constraint=limits, **each)
            for i, (prompt, n, limits) in enumerate(zip(repeated, longest, constraints, strict=True))
        ]

    def _max_tokens(self, prompt: Sequence[int], max_tokens: int | None) -> int:
        """Checks a prompt. Returns the largest number of tokens of its answer, by default as many as fit."""
        vocab_size = self.decoding.vocab_size
        longest = self.service.scheduler.capacity.max_len
        if not prompt:
            raise ApiError(400, "prompt: is empty; write at least one character", "prompt")
        if not all(0 <= token < vocab_size for token in prompt):
            raise ApiError(400, f"prompt: has ids outside of the model's vocabulary of {vocab_size}", "prompt")
        max_tokens = max(1, longest - len(prompt)) if max_tokens is None else max_tokens
        if len(prompt) + (more := max_tokens or 1) > longest:
            what = f"{len(prompt)} tokens and {more} more do not fit {longest}, the longest row of this server"
            raise ApiError(400, what, "prompt", "context_length_exceeded")
        return max_tokens

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with self.service.running():
            yield


@contextmanager
def _named(key: str) -> Iterator[None]:
    """Names the key of a request in an error of its grammar."""
    try:
        yield
    except ConfigError as error:
        raise ApiError(400, f"{key}: {error}", key) from None
