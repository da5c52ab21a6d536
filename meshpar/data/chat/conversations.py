"""Reads conversations in the forms in which people write them: messages, prompt and completion, ShareGPT's."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshpar.errors import nearest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SHARE_GPT = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "bing": "assistant", "bard": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool", "function_call": "assistant",
}  # fmt: skip
"""Who speaks in ShareGPT's form -> the role."""
FORMS = "messages, or prompt and completion, or conversations (ShareGPT's form)"


PROMPT = '{"prompt": ...}, a text or messages'
PAIR = '{"prompt": ..., "chosen": ..., "rejected": ...}, each a text or messages'


@dataclass(frozen=True)
class Conversation:
    """A conversation, as a template reads it.

    Args:
      messages: with `role`, `content` and what else a template knows.
      is_learned: for each message, whether the model learns to write it.
      tools: JSON schemas of functions that the model may call.
      options: further variables of the template.
    """

    messages: Sequence[dict[str, Any]]
    is_learned: Sequence[bool]
    tools: Sequence[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def read(value: Any) -> Conversation:
    """The conversation in an object of a file.

    Raises:
      ValueError: (what is wrong), or (what is wrong, the fix).

    >>> read({"prompt": "2 + 2?", "completion": "4"}).messages
    [{'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant', 'content': '4'}]
    >>> read({"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}).is_learned
    [False, True]
    """
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object", '{"messages": [{"role": ..., "content": ...}]}')
    return _conversation(value, *_messages(value))


def read_pair(value: Any) -> tuple[Conversation, Conversation]:
    """The conversations with the chosen and with the rejected answer, in an object of a file.

    Raises:
      ValueError: (what is wrong), or (what is wrong, the fix).

    >>> chosen, rejected = read_pair({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"})
    >>> chosen.messages[1], rejected.messages[1]
    ({'role': 'assistant', 'content': '4'}, {'role': 'assistant', 'content': '5'})
    """
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object", PAIR)
    if missing := [key for key in ("chosen", "rejected") if key not in value]:
        near = nearest(missing[0], value)
        raise ValueError(f"has no {' and no '.join(missing)}", f"rename {near} to {missing[0]}" if near else PAIR)
    chosen, rejected = (_side(value[key], key, "assistant") for key in ("chosen", "rejected"))
    if "prompt" in value:
        before = len(_side(value["prompt"], "prompt", "user"))
        # Each side has dicts of its own: reading a message changes it.
        chosen, rejected = (_side(value["prompt"], "prompt", "user") + side for side in (chosen, rejected))
    else:
        before = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), 0)
        if not before:
            raise ValueError("has no prompt, and its two sides do not begin with the same messages", PAIR)
    if chosen == rejected:
        raise ValueError("prefers an answer to the same answer", "leave it out")
    return _conversation(value, chosen, before), _conversation(value, rejected, before)


def read_prompt(value: Any) -> Conversation:
    """The prompt in an object of a file: a conversation that an answer follows, of which nothing is learned.

    Raises:
      ValueError: (what is wrong), or (what is wrong, the fix).

    >>> read_prompt({"prompt": "2 + 2?", "answer": 4}).messages
    [{'role': 'user', 'content': '2 + 2?'}]
    """
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object", PROMPT)
    if key := next((key for key in ("prompt", "messages") if key in value), None):
        messages = _side(value[key], key, "user") if key == "prompt" else _list(value[key], key)
    else:
        near = nearest("prompt", value)
        raise ValueError(f"has the keys {sorted(value)}, and no prompt", f"rename {near} to prompt" if near else PROMPT)
    _check(messages)
    if not messages or not str(messages[-1].get("content") or "").strip():
        raise ValueError("has a prompt without text", PROMPT)
    if messages[-1]["role"] == "assistant":
        raise ValueError("ends with a message of the assistant, and the model writes the answer", "leave it out")
    return _with_settings(value, messages, [False] * len(messages))


def _conversation(value: dict[str, Any], messages: list[dict[str, Any]], first_learned: int) -> Conversation:
    _check(messages)
    weights = [message.pop("weight", 1) for message in messages]
    if wrong := [weight for weight in weights if weight not in (0, 1)]:
        raise ValueError(f"has the weight {wrong[0]!r}", "0 for a message that is not learned, 1 for one that is")
    learned = [
        message["role"] == "assistant" and bool(weight) and at >= first_learned
        for at, (message, weight) in enumerate(zip(messages, weights, strict=True))
    ]
    if not any(learned):
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages)) or "no message"
        what = "has no message of the assistant to learn from"
        raise ValueError(f"{what}: {roles}", "a message with role: assistant, and no weight of 0")
    return _with_settings(value, messages, learned)


def _with_settings(value: dict[str, Any], messages: list[dict[str, Any]], is_learned: list[bool]) -> Conversation:
    options = value.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise ValueError("its chat_template_kwargs are no object")
    return Conversation(messages, is_learned, _tools(value.get("tools")), options)


def forged(value: Any, special: Collection[str]) -> str | None:
    """The first special token whose text occurs in a message, at any depth."""
    return next((token for text in _texts(value) for token in special if token in text), None)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _texts(one)


# The forms ----------------------------------------------------------------------------------------------------------


def _messages(value: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """The messages, and the index of the first that may be learned."""
    if "messages" in value:
        return _list(value["messages"], "messages"), 0
    if "prompt" in value and "completion" in value:
        before = _side(value["prompt"], "prompt", "user")
        return [*before, *_side(value["completion"], "completion", "assistant")], len(before)
    if "conversations" in value:
        turns = [_of_share_gpt(turn) for turn in _list(value["conversations"], "conversations")]
        has_system = isinstance(value.get("system"), str) and value["system"]
        return ([{"role": "system", "content": value["system"]}] if has_system else []) + turns, 0
    if "chosen" in value:
        raise ValueError(
            "is a pair of answers, and no conversation", "data.kind=preferences, and loss.kind=dpo or orpo"
        )
    near = nearest("messages", value)
    what = f"has the keys {sorted(value)}, and no conversation"
    raise ValueError(what, f"rename {near} to messages" if near else FORMS)


def _side(value: Any, key: str, role: str) -> list[dict[str, Any]]:
    """A prompt or a completion: a text, or messages."""
    return [{"role": role, "content": value}] if isinstance(value, str) else _list(value, key)


def _list(value: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError(f"its {key!r} is no list of objects", f'"{key}": [{{"role": ..., "content": ...}}]')
    return [dict(one) for one in value]


def _of_share_gpt(turn: dict[str, Any]) -> dict[str, Any]:
    speaker, text = turn.get("from"), turn.get("value")
    if "role" in turn:  # some files have this key in that list
        return turn
    if speaker not in SHARE_GPT:
        near = nearest(str(speaker), SHARE_GPT)
        raise ValueError(f"has a turn from {speaker!r}, who is unknown", near or f"one of {', '.join(SHARE_GPT)}")
    if speaker == "function_call":
        call = _parsed(text, "the value of a function_call")
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    weight = {"weight": turn["weight"]} if "weight" in turn else {}
    return {"role": SHARE_GPT[speaker], "content": text} | weight


def _check(messages: list[dict[str, Any]]) -> None:
    """Checks messages, and writes their contents as text and their calls as objects, which templates expect."""
    for number, message in enumerate(messages, 1):
        _check_one(message, f"message {number}")


def _check_one(message: dict[str, Any], where: str) -> None:
    role = message.get("role")
    if role not in ROLES:
        near = nearest(str(role), ROLES)
        raise ValueError(f"{where} has the unknown role {role!r}", f"{near}?" if near else f"one of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = "".join(_part(part, where) for part in content)
    elif content is None:
        if not message.get("tool_calls"):
            raise ValueError(f"{where} has neither content nor tool_calls", '"content": "..."')
    elif not isinstance(content, str):
        raise ValueError(f"{where} has a content that is no text", '"content": "..."')
    if message.get("tool_calls"):
        message["tool_calls"] = with_parsed_arguments(message["tool_calls"], where)


def _part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ValueError(f"{where} has a part of type {kind!r}, and only text can be learned", "leave it out")


def with_parsed_arguments(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls of functions with their arguments as objects, which templates expect: OpenAI's API has them as JSON text.

    Raises:
      ValueError: they are no calls.
    """
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where} has tool_calls that are no list of objects")
    parsed = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where} calls a function without a name", '{"function": {"name": ..., "arguments": {}}}')
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            function = function | {"arguments": _parsed(arguments, f"{where}: the arguments of {function['name']}")}
        parsed.append(call | {"function": function} if "function" in call else function)
    return parsed


def _tools(value: Any) -> list[Any] | None:
    """A list of tools; some tables can hold it only as JSON text."""
    tools = _parsed(value, "tools", list) if isinstance(value, str) and value.strip() else value
    if tools in (None, [], ""):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("its tools are no list of objects", '[{"type": "function", "function": {...}}]')
    return tools


def _parsed(text: Any, what: str, kind: type = dict) -> Any:
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise ValueError(f"{what}: no JSON {'object' if kind is dict else 'list'}")
    return value
