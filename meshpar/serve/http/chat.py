"""Encodes the messages of a chat as a prompt, by the template of the model's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshpar.data.chat.conversations import forged, with_parsed_arguments
from meshpar.data.chat.template import ChatTemplate
from meshpar.data.tokenizer import TokenizerFile
from meshpar.errors import ConfigError


def encode_chat(
    tokenizer: TokenizerFile, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **settings: Any
) -> list[int]:
    """The tokens of a chat, up to where the answer begins. Only the template may add special tokens.

    Args:
      settings: of `ChatTemplate.rendered`.

    Raises:
      ConfigError: the arguments of a call are no JSON object, or a message contains the text of a special token. It
        could forge the end of its turn, and another role.
    """
    messages = [_with_objects(message, number) for number, message in enumerate(messages)]
    for number, message in enumerate(messages):
        if found := forged(message, tokenizer.special_tokens):
            raise ConfigError(f"messages.{number}: contains {found!r}, a special token of the model")
    return tokenizer.encode_special(template.render(messages, **settings)).tolist()


def _with_objects(message: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """A message whose calls have arguments as objects, which templates expect."""
    if not message.get("tool_calls"):
        return message
    try:
        calls = with_parsed_arguments(message["tool_calls"], f"messages.{number}")
    except ValueError as error:
        raise ConfigError(str(error.args[0])) from None
    return {**message, "tool_calls": calls}
