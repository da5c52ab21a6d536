"""Renders the messages of a chat as a prompt, by the template of the model's tokenizer."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshpar.errors import CheckpointError, ConfigError, Problems
from meshpar.interop.folder import read_json
from meshpar.regular import open_regular
from meshpar.train.data.special_tokens import special_tokens
from meshpar.train.data.tokenizer import TokenizerFile

CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
LONGEST_S = 5.0
"""The longest time that a template may take for a chat."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template. It comes with the model, so it runs in Jinja's immutable sandbox.

    Args:
      text: the template.
      special: names of special tokens -> tokens, such as `bos_token`.
    """

    text: str
    special: dict[str, str]

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt, up to where the answer begins.

        Raises:
          ConfigError: the template refuses the messages, has an error, or takes longer than `LONGEST_S`.
        """
        variables = {"messages": list(messages), "add_generation_prompt": True, "tools": None, "documents": None}
        try:
            return _within(LONGEST_S, lambda: _ENVIRONMENT.from_string(self.text).render(**variables | self.special))
        except Exception as error:  # a template can fail as any program can
            raise ConfigError(f"messages: the model's chat template fails: {error}") from None


def read_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a Hugging Face folder; None if it has none.

    Raises:
      CheckpointError: a file cannot be read.
    """
    problems = Problems()
    config = read_json(folder, CONFIG, problems) if (folder / CONFIG).exists() else {}
    text = config.get("chat_template")
    if isinstance(text, list):  # several templates, by name
        named = {one.get("name"): one.get("template") for one in text if isinstance(one, dict)}
        text = named.get("default")
    if (folder / TEMPLATE).exists():
        try:
            with open_regular(folder / TEMPLATE) as file:
                text = file.read().decode("utf-8")
        except (OSError, ValueError) as error:
            problems.add(str(folder / TEMPLATE), f"cannot be read: {error}")
    problems.raise_any(CheckpointError, f"the chat template of {folder} cannot be read:")
    if not isinstance(text, str):
        return None
    return ChatTemplate(text, special_tokens(folder))


def encode_chat(tokenizer: TokenizerFile, template: ChatTemplate, messages: Sequence[dict[str, Any]]) -> list[int]:
    """The tokens of a chat. Only the template may add special tokens.

    Raises:
      ConfigError: a message contains the text of a special token. It could forge the end of its turn, and another role.
    """
    for number, message in enumerate(messages):
        for text in message.values():
            if found := next((token for token in tokenizer.special_tokens if token in text), None):
                raise ConfigError(f"messages.{number}: contains {found!r}, a special token of the model")
    return tokenizer.encode_special(template.render(messages)).tolist()


def _within(seconds: float, render: Callable[[], str]) -> str:
    """The result of `render`, which is interrupted after this time at the next line of Python."""
    end = time.monotonic() + seconds

    def check(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(f"it takes longer than {seconds:g} s")
        return check

    before = sys.gettrace()
    sys.settrace(check)  # of this thread alone
    try:
        return render()
    finally:
        sys.settrace(before)


class _Generation(Extension):
    """`{% generation %}` marks the answers of a chat, for training. A prompt contains them as they are."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _as_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own filter, it does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


# Templates written for transformers rely on these options, this filter and these functions.
_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
)
_ENVIRONMENT.filters["tojson"] = _as_json
_ENVIRONMENT.globals.update(raise_exception=_raise, strftime_now=_now)
