"""Renders the messages of a chat by the template that comes with a model's tokenizer, in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from meshpar.data.chat.sandbox import RenderedChat, render
from meshpar.data.special_tokens import special_tokens, tokenizer_config
from meshpar.errors import ConfigError, DataError
from meshpar.regular_files import open_regular

TEMPLATE = "chat_template.jinja"
TOOL_USE = "additional_chat_templates/tool_use.jinja"
"""The template for chats with tools, if it is another one."""
OWN = ("messages", "tools", "documents", "add_generation_prompt")
"""The variables that are not options."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message for the thoughts before an answer: templates read the first, or the second."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template. It comes with the model, so it runs in a sandbox.

    Args:
      text: the template.
      special: names of special tokens -> tokens, such as `bos_token`.
      tool_use: the template for chats with tools, if there is one of its own.
    """

    text: str
    special: dict[str, str]
    tool_use: str | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        """The prompt, up to where the answer begins; see `rendered`."""
        return self.rendered(messages, **settings).text

    def rendered(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, answers: bool = True,
        date: datetime | None = None, options: Mapping[str, Any] | None = None,
    ) -> RenderedChat:  # fmt: skip
        """The text of a chat, and its generated parts.

        Args:
          answers: whether the text ends with what opens an answer.
          date: what `strftime_now` formats; default: now.
          options: further variables of the template.

        Raises:
          ConfigError: the template refuses the messages, has an error, takes too long, or writes too much; see
            `sandbox`.
        """
        variables = {
            **self.special, **(options or {}), "messages": [_as_templates_read(one) for one in messages],
            "tools": tools, "documents": None, "add_generation_prompt": answers,
        }  # fmt: skip
        try:
            return render(self._for(bool(tools)), variables, date)
        except ValueError as error:
            raise ConfigError(f"messages: the model's chat template fails: {error}") from None

    def marks_answers(self, with_tools: bool = False) -> bool:
        """Whether it marks the parts that the model generates, by `{% generation %}`."""
        return re.search(r"\{%[-+]?\s*generation\b", self._for(with_tools)) is not None

    def unread(self, options: Iterable[str]) -> list[str]:
        """The variables that change nothing: it does not read them, or they are those that `rendered` sets."""
        texts = (self.text, self.tool_use or "")
        is_read = lambda name: any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts)
        return [name for name in options if name in OWN or not is_read(name)]

    def reads_the_date(self, with_tools: bool = False) -> bool:
        """Whether it may write the date of today."""
        return "strftime_now" in self._for(with_tools)

    def _for(self, with_tools: bool) -> str:
        return self.tool_use if with_tools and self.tool_use else self.text


def read_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a Hugging Face folder; None if it has none.

    Raises:
      DataError: a file cannot be read.
    """
    named = tokenizer_config(folder).get("chat_template")
    if isinstance(named, list):  # several templates, by name
        named = {one.get("name"): one.get("template") for one in named if isinstance(one, dict)}
    templates = named if isinstance(named, dict) else {"default": named}
    if (folder / TEMPLATE).exists():  # as in transformers, it replaces those of the other file
        templates = {"default": _text(folder / TEMPLATE)}
        if (folder / TOOL_USE).exists():
            templates["tool_use"] = _text(folder / TOOL_USE)
    text, tool_use = templates.get("default"), templates.get("tool_use")
    if not isinstance(text, str):
        return None
    return ChatTemplate(text, special_tokens(folder), tool_use if isinstance(tool_use, str) else None)


def _text(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return file.read().decode("utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"the chat template {path} cannot be read: {error}") from None


def _as_templates_read(message: Mapping[str, Any]) -> dict[str, Any]:
    """As transformers gives it to a template: without nulls, and with thoughts by all names that templates read."""
    kept = {key: value for key, value in message.items() if value is not None}
    thoughts = next((kept[key] for key in _REASONING if key in kept), None)
    return kept if thoughts is None else {"thinking": thoughts, **kept, "reasoning_content": thoughts}
