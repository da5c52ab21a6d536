"""Calls of tools in answers, in the forms in which models write them."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from meshpar.data.chat.template import ChatTemplate
from meshpar.serve.answer import overlap
from meshpar.serve.constraint import written_closely


@dataclass(frozen=True)
class Form:
    """How a model writes calls: `Hermes`, `Llama3` or `Mistral`.

    Args:
      opener, closer: the text before and after a call, or all calls.
      key: that of a call's arguments.
    """

    opener: ClassVar[str]
    closer: ClassVar[str] = ""
    key: ClassVar[str] = "arguments"
    one: ClassVar[Mapping[str, Any]] = {}
    """What a schema of one call has besides."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts around calls, which are special tokens in some vocabularies."""
        return tuple(text for text in (self.opener, self.closer) if text)

    def begin(self, text: str) -> int:
        """Where calls may begin in a text that is not complete, or the space before them; its length if nowhere."""
        found = text.find(self.opener)
        return len((text[:found] if found >= 0 else text[: len(text) - overlap(text, self.opener)]).rstrip())

    def calls(self, text: str) -> tuple[str, list[Any]]:
        """The text before the calls, and the objects of the calls; none if they are not complete JSON."""
        raise NotImplementedError

    def grammar(self, tools: Sequence[Mapping[str, Any]], special: Mapping[str, int]) -> str:
        """The Lark grammar of one call.

        Args:
          tools: functions with `name` and `parameters`.
          special: special token -> id, which no text contains.
        """
        parts = [_written(self.opener, special)] if self.opener != "{" else []
        parts += ["call", *([_written(self.closer, special)] if self.closer else [])]
        return f"start: {' '.join(parts)}\n{self._call({**self._schema(tools), **self.one})}"

    def grammar_of_text(self, tools: Sequence[Mapping[str, Any]], special: Mapping[str, int]) -> str:
        """The Lark grammar of a text with any number of calls, those of strict functions by their schemas.

        Args:
          tools, special: see `grammar`.
        """
        free = {"parameters": {"type": "object"}}
        schema = self._schema([tool if tool.get("strict") else {**tool, **free} for tool in tools])
        return f"{self._text(special)}TEXT: /(.|\\n)*/\nSPACE: /[ \\n]{{0,2}}/\n{self._call(schema)}"

    def _text(self, special: Mapping[str, int]) -> str:
        """The rules `start` of a text with calls, and `head`, of the text up to where a call begins."""
        closer = f" SPACE {_written(self.closer, special)}" if self.closer else ""
        is_lazy = "" if self.opener in special else "[lazy]"  # the first text that ends so is followed by a call
        return f"start: (head SPACE call{closer})* TEXT\nhead{is_lazy}: TEXT {_written(self.opener, special)}\n"

    def _call(self, schema: Mapping[str, Any]) -> str:
        return f"call: %json {json.dumps(written_closely(schema))}\n"

    def _schema(self, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"anyOf": [self._of(tool) for tool in tools]}

    def _of(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        arguments = tool.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
        properties = {"name": {"const": tool["name"]}, self.key: arguments}
        return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


class Hermes(Form):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes, Qwen and SmolLM3."""

    opener = "<tool_call>"
    closer = "</tool_call>"

    def calls(self, text: str) -> tuple[str, list[Any]]:
        before, *rest = text.split(self.opener)
        return before, [_json(one.partition(self.closer)[0]) for one in rest]


class Llama3(Form):
    """`{"name": ..., "parameters": {...}}` as the whole answer, after `<|python_tag|>` or not; semicolons between."""

    opener = "{"
    key = "parameters"
    tag = "<|python_tag|>"

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.tag,)

    def _text(self, special: Mapping[str, int]) -> str:
        tag = _written(self.tag, special)
        first = r"OTHER: /\s*([^{\s](.|\n)*)?/"
        if self.tag not in special:
            first += rf" & ~/\s*{re.escape(self.tag)}(.|\n)*/"
        return f'start: OTHER | {tag}? SPACE call (";" SPACE call)*\n{first}\n'

    def begin(self, text: str) -> int:
        start = text.lstrip()
        return 0 if not start or start.startswith((self.opener, self.tag)) or self.tag.startswith(start) else len(text)

    def calls(self, text: str) -> tuple[str, list[Any]]:
        whole = text.strip().removeprefix(self.tag).strip()
        return ("", list(_jsons(whole))) if whole.startswith(self.opener) else (text, [])


class Mistral(Form):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`."""

    opener = "[TOOL_CALLS]"
    one: ClassVar = {"maxItems": 1}

    def _text(self, special: Mapping[str, int]) -> str:
        return super()._text(special).replace("start: (head SPACE call)* TEXT", "start: TEXT | head SPACE call")

    def calls(self, text: str) -> tuple[str, list[Any]]:
        before, found, rest = text.partition(self.opener)
        listed = _json(rest) if found else []
        return before, listed if isinstance(listed, list) else [listed]

    def _schema(self, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"type": "array", "items": super()._schema(tools), "minItems": 1}


def _written(text: str, special: Mapping[str, int]) -> str:
    """A text in a grammar: a special token, or a literal."""
    return f"<[{special[text]}]>" if text in special else json.dumps(text)


def form_of(template: ChatTemplate) -> Form | None:
    """The form in which a template writes calls; None if it renders no tools, or in a form that is not known."""
    text = template.tool_use or template.text
    if "tools" not in text:
        return None
    if Mistral.opener in text:
        return Mistral()
    if Hermes.opener in text:
        return Hermes()
    return Llama3() if '"parameters"' in text and '"name"' in text else None


def read_calls(form: Form, text: str, names: Sequence[str], is_parallel: bool) -> tuple[str, list[dict[str, Any]]]:
    """The content of an answer and its calls in OpenAI's form; an answer whose calls cannot be read is content.

    >>> text = 'Yes. <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    >>> content, (call,) = read_calls(Hermes(), text, ["f"], True)
    >>> content, call["function"]
    ('Yes.', {'name': 'f', 'arguments': '{"x": 1}'})
    """
    before, found = form.calls(text)
    calls = [_call(form, one, names) for one in found]
    if not calls or not all(calls):
        return text, []
    return before.rstrip(), [call for call in calls if call][: None if is_parallel else 1]


def _call(form: Form, value: Any, names: Sequence[str]) -> dict[str, Any] | None:
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get(form.key, value.get("arguments", {}))
    if not isinstance(arguments, dict):
        return None
    written = json.dumps(arguments, ensure_ascii=False)
    function = {"name": value["name"], "arguments": written}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _jsons(text: str) -> Iterator[Any]:
    """The objects of a text, separated by semicolons."""
    decode = json.JSONDecoder().raw_decode
    while text:
        try:
            value, end = decode(text)
        except (ValueError, RecursionError):
            yield None
            return
        yield value
        text = text[end:].lstrip("; \n")
