"""The body of `/v1/chat/completions`: messages, tools, and the form of the answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from meshpar.serve.constraint import Grammar, Grammars
from meshpar.serve.http.bodies import Body, RequestBody
from meshpar.serve.scores import MOST_RANKED


class TextPart(Body):
    """A part of a message. Other kinds, such as images, are not supported."""

    type: Annotated[str, Field(pattern="^text$")]
    text: str


class Called(Body):
    """The function of a call."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call of a tool, as the assistant wrote it."""

    id: str
    type: Literal["function"] = "function"
    function: Called


class Message(Body):
    """A message of a chat. The template decides which roles there are."""

    role: str
    content: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("content: is missing, and there are no tool_calls")
        return self

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, data: Any) -> Any:
        """Removes keys whose values are null: clients send back answers with keys such as `refusal`."""
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        return "".join(TextPart.model_validate(part).text for part in value) if isinstance(value, list) else value


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether the arguments of calls follow `parameters`. They do where the answer must be a call."""


class Tool(Body):
    """A tool of a request."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that an answer must call."""

    type: Literal["function"]
    function: NamedFunction


class NamedSchema(Body):
    """A JSON schema. It is always enforced, whatever `strict` is."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class Format(Body):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> Format:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: belongs to type json_schema, which needs it")
        return self


class ChatBody(RequestBody):
    """The body of `/v1/chat/completions`. `chat_template_kwargs`, variables of the template, are not OpenAI's."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: Format | None = None
    tools: Annotated[list[Tool] | None, Field(max_length=128)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MOST_RANKED)] = None

    @property
    def num_ranked(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @model_validator(mode="after")
    def _check(self) -> ChatBody:
        if self.max_tokens and self.max_completion_tokens:
            raise ValueError("max_tokens: is max_completion_tokens by its earlier name; leave one of them out")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: has no effect without logprobs; add logprobs: true")
        names = [tool.function.name for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: no tool is called {self.tool_choice.function.name[:100]!r}")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: required needs tools")
        if len(set(names)) < len(names):
            raise ValueError("tools: two have the same name")
        if sum((self.structured_outputs is not None, self.format_schema is not None, self.limits_calls)) > 1:
            raise ValueError(
                "response_format: an answer follows one of response_format, structured_outputs, tool_choice and strict "
                "functions"
            )
        return self

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def limits_calls(self) -> bool:
        """Whether calls follow the schemas of their functions: the answer must be one, or a function is strict."""
        return self.must_call or any(tool.function.strict for tool in self.callable)

    @property
    def callable(self) -> list[Tool]:
        """The tools that the answer may call."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.tools or () if tool.function.name == self.tool_choice.function.name]
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def format_schema(self) -> dict[str, Any] | None:
        """The schema that `response_format` asks for."""
        if self.response_format is None or self.response_format.type == "text":
            return None
        named = self.response_format.json_schema
        return named.json_schema if named else {"type": "object"}

    def grammar(self, grammars: Grammars) -> Grammar | None:
        return super().grammar(grammars) if self.format_schema is None else grammars.of_schema(self.format_schema)
