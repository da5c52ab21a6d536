"""Renders the messages of a chat as a prompt, by the template of the model's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshpar.errors import CheckpointError, ConfigError, Problems
from meshpar.interop.folder import read_json
from meshpar.regular import open_regular
from meshpar.train.data.tokenizer import TokenizerFile

CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"


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
          ConfigError: the template refuses the messages, or has an error.
        """
        try:
            return _ENVIRONMENT.from_string(self.text).render(
                messages=list(messages), add_generation_prompt=True, tools=None, documents=None, **self.special
            )
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
    found = {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return ChatTemplate(text, {name: token for name, token in found.items() if token is not None})


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


def _content(token: Any) -> str | None:
    """The text of a special token, which is stored as text or as an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _as_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


# Templates written for transformers rely on these options, this filter and these functions.
_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
)
_ENVIRONMENT.filters["tojson"] = _as_json
_ENVIRONMENT.globals.update(raise_exception=_raise, strftime_now=_now)
