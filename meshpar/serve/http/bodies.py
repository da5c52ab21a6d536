"""The bodies of requests of OpenAI's API.

A key of OpenAI's API that is not supported is refused, unless its value is the one that has no effect.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from meshpar.data.special_tokens import SamplingDefaults
from meshpar.errors import nearest
from meshpar.serve.adjust import MOST_BIASED, Adjustment
from meshpar.serve.constraint import Grammar, Grammars
from meshpar.serve.http.errors import ApiError
from meshpar.serve.sampling import Sampling
from meshpar.serve.scores import MOST_RANKED

LONGEST_GRAMMAR = 100_000
"""The most characters of a grammar or a regular expression."""
MOST_ANSWERS = 128
"""The most answers of a request: prompts times `n`."""

IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Keys that do not affect answers."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,), "best_of": (None, 1), "echo": (None, False),
    "function_call": (None, "none"), "functions": (None, []), "logprobs": (None, False),
    "modalities": (None, ["text"]), "parallel_tool_calls": (None, True, False), "prediction": (None,),
    "reasoning_effort": (None, "none"), "response_format": (None, {"type": "text"}),
    "suffix": (None, ""), "tool_choice": (None, "none"), "tools": (None, []), "top_logprobs": (None, 0),
    "verbosity": (None,), "web_search_options": (None,),
}  # fmt: skip
"""Keys of OpenAI's API that are not supported -> the values that have no effect."""


class Body(BaseModel):
    """A part of a body, whose keys are known and have the types that they should."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Structured(Body):
    """What an answer must match, one of these: not OpenAI's."""

    regex: Annotated[str | None, Field(min_length=1, max_length=LONGEST_GRAMMAR)] = None
    grammar: Annotated[str | None, Field(min_length=1, max_length=LONGEST_GRAMMAR)] = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="json")

    @model_validator(mode="after")
    def _one(self) -> Structured:
        if sum(one is not None for one in (self.regex, self.grammar, self.json_schema)) != 1:
            raise ValueError("has one key: regex, grammar or json")
        return self

    def grammar_of(self, grammars: Grammars) -> Grammar:
        """The grammar, which is checked."""
        if self.regex is not None:
            return grammars.of_regex(self.regex)
        if self.grammar is not None:
            return grammars.of_lark(self.grammar)
        return grammars.of_schema(self.json_schema or {})


class RequestBody(Body):
    """The keys that completions and chats share.

    `top_k`, `min_p`, `stop_token_ids`, `repetition_penalty` and `structured_outputs` are not OpenAI's.
    """

    model: str | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=100, allow_inf_nan=False)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=0, lt=2**32)] = None
    n: Annotated[int | None, Field(ge=1, le=MOST_ANSWERS)] = 1
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]] | None, Field(max_length=64)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=10)] = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, Field(max_length=MOST_BIASED)] = (
        None
    )
    structured_outputs: Structured | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        if value is None:
            return []
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _streams(self) -> RequestBody:
        if self.stream_options and not self.stream:
            raise ValueError("stream_options: has no effect without stream; add stream: true")
        return self

    @field_validator("logit_bias")
    @classmethod
    def _of_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if wrong := [key for key in value or () if not (key.isascii() and key.isdecimal() and len(key) < 10)]:
            raise ValueError(f'{wrong[0][:100]!r} is no token id, such as "42"')
        return value

    @property
    def num_ranked(self) -> int | None:
        """How many of the most probable tokens are listed beside each token; None if nothing is scored."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    def grammar(self, grammars: Grammars) -> Grammar | None:
        """What the answer must match, if the request says it.

        Raises:
          ConfigError: the grammar has an error.
        """
        return self.structured_outputs and self.structured_outputs.grammar_of(grammars)

    def adjustment(self, default: SamplingDefaults) -> Adjustment:
        """How single logits change."""
        return Adjustment(
            bias={int(key): value for key, value in (self.logit_bias or {}).items()},
            presence=self.presence_penalty or 0.0, frequency=self.frequency_penalty or 0.0,
            repetition=self.repetition_penalty or default.repetition_penalty,
        )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for key, value in data.items():
            if key in cls.model_fields or key not in {*NEUTRAL, *IGNORED}:
                kept[key] = value
            elif key in NEUTRAL and not any(_same(value, neutral) for neutral in NEUTRAL[key]):
                raise ValueError(f"{key} is not supported: leave it out")
        return kept

    def sampling(self, default: SamplingDefaults) -> Sampling:
        """How tokens are sampled: as the request says, or else as the model's `generation_config.json`.

        The seed is random by default. With temperature 0 the others have no effect.
        """
        temperature = default.temperature if self.temperature is None else self.temperature
        if temperature == 0:
            return Sampling()
        seed = secrets.randbelow(2**32) if self.seed is None else self.seed
        return Sampling(
            temperature=temperature, top_k=self.top_k or default.top_k, top_p=self.top_p or default.top_p,
            min_p=default.min_p if self.min_p is None else self.min_p, seed=seed,
        )  # fmt: skip


class CompletionBody(RequestBody):
    """The body of `/v1/completions`. `parse_special` is not OpenAI's: see `generate`."""

    prompt: list[str | list[int]]
    parse_special: bool = True
    max_tokens: Annotated[int | None, Field(ge=0)] = 16
    logprobs: Annotated[int | None, Field(ge=0, le=MOST_RANKED)] = None
    echo: bool | None = False

    @property
    def num_ranked(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @field_validator("logprobs", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        return None if value is False else value

    @model_validator(mode="after")
    def _check(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: with 0 there is no answer; 1 or more, or echo to score the prompt")
        if self.echo and self.stream:
            raise ValueError("echo: is not streamed; leave out echo or stream")
        return self

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, value: Any) -> Any:
        is_one = isinstance(value, str) or (isinstance(value, list) and bool(value) and isinstance(value[0], int))
        return [value] if is_one else value


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(kind: type[AnyBody], body: bytes) -> AnyBody:
    """Reads a body.

    Raises:
      ApiError: lists all problems.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problems = [_problem(kind, one) for one in error.errors(include_url=False, include_context=False)[:20]]
        params = [param for param, _ in problems]
        raise ApiError(400, "; ".join(text for _, text in problems), params[0]) from None


def _problem(kind: type[Body], error: Any) -> tuple[str | None, str]:
    """The key of a problem, and what is wrong with it."""
    where = ".".join(str(part)[:100] for part in error["loc"])
    what = str(error["msg"]).removeprefix("Value error, ")[:500]
    if error["type"] == "extra_forbidden":
        near = nearest(where, kind.model_fields) if len(error["loc"]) == 1 else None
        what = "unknown key" + (f"; did you mean {near}?" if near else "")
    return (where, f"{where}: {what}") if where else (None, what)


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
