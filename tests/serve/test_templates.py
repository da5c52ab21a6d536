"""Twenty templates in the manners of models, with and without tools and thoughts: each text is that of transformers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from meshpar.data.chat.template import ChatTemplate
from meshpar.errors import ConfigError
from tests.chats import write_tokenizer
from tests.serve.templates import TEMPLATES

TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "<now>", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "add", "description": "é"}},
]
CALLS = [
    {"id": "123456789", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "n": 1}}}
]
CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one question": ([{"role": "user", "content": " Hi there \n"}], {}),
    "several turns": ([
        {"role": "system", "content": "Be brief & kind."}, {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<think>\nadd\n</think>\n\n4"}, {"role": "user", "content": "{{ x }} 'naïve'"},
        {"role": "assistant", "content": "  yes\n\nindeed ", "reasoning": "hm"},
    ], {}),
    "tools": ([
        {"role": "user", "content": "Rain?"}, {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "content": "no", "name": "weather"}, {"role": "tool", "content": "3", "name": "add"},
        {"role": "assistant", "content": "No."}, {"role": "user", "content": "Thanks"},
    ], {"tools": TOOLS}),
    "options": ([{"role": "user", "content": "Hi"}],
                {"options": {"enable_thinking": False, "date_string": "1 Jan 2027", "reasoning_effort": "high"}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Any:
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path_factory.mktemp("model"), None, ["<s>", "<unk>", "</s>"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoTokenizer.from_pretrained(folder)


def attempt(render: Callable[[], str]) -> tuple[str, str]:
    """What is written, and the first line of what is raised."""
    try:
        return render(), ""
    except Exception as error:  # the class depends on what the template does
        return "", str(error).splitlines()[0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_writes_what_it_writes_in_transformers(name, theirs):
    """Or it refuses what it refuses there: some take no tools, or turns that do not alternate."""
    ours = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    written = 0
    for messages, settings in CHATS.values():
        for answers in (False, True):
            more = {"tools": settings.get("tools"), **settings.get("options", {})}
            more |= {"chat_template": TEMPLATES[name], "tokenize": False, "add_generation_prompt": answers}
            want, why = attempt(partial(theirs.apply_chat_template, messages, **more))
            if why:
                with pytest.raises(ConfigError, match=re.escape(why)):
                    ours.rendered(messages, answers=answers, **settings)
                continue
            assert ours.rendered(messages, answers=answers, **settings).text == want
            written += 1
    assert written >= 4


def test_there_are_twenty():
    assert len({*TEMPLATES.values()}) == 20
