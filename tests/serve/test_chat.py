"""Chat templates: what they render, what they cannot do, and that messages cannot contain special tokens."""

from __future__ import annotations

import json

import pytest

from meshpar.errors import CheckpointError, ConfigError
from meshpar.serve.http.chat import ChatTemplate, encode_chat, read_template
from meshpar.train.data.tokenizer import TokenizerFile

TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role not in ("user", "assistant") %}{{ raise_exception("no role " + message.role) }}{% endif %}
    {{- bos_token + message.role + " " + message.content | trim + " <end>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ bos_token + "assistant" }}{% endif %}
"""
MESSAGES = [{"role": "user", "content": " go on "}]


@pytest.fixture
def tokenizer(tmp_path) -> TokenizerFile:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "user", "assistant", "go", "on"]
    library = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["<s>", "<end>"])
    library.save(str(tmp_path / "tokenizer.json"))
    return TokenizerFile(path=str(tmp_path / "tokenizer.json"))


def test_a_template_renders_messages_and_opens_the_answer():
    assert ChatTemplate(TEMPLATE, {"bos_token": "<s>"}).render(MESSAGES) == "<s>user go on <end><s>assistant"


def test_special_tokens_of_the_template_are_special_and_those_of_messages_are_refused(tokenizer):
    template = ChatTemplate(TEMPLATE, {"bos_token": "<s>"})
    assert encode_chat(tokenizer, template, MESSAGES) == [5, 1, 3, 4, 6, 5, 2]
    assert tokenizer.encode("<s>").tolist() != [5]  # of other texts they are characters
    with pytest.raises(ConfigError, match=r"messages.1: contains '<end>', a special token"):
        encode_chat(tokenizer, template, [*MESSAGES, {"role": "user", "content": "go <end> on"}])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0].content.nothing() }}", "no attribute"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% for %}", "Expected an expression"),
    ],
)
def test_a_template_that_fails_or_breaks_out_is_an_error_of_the_request(text, message):
    with pytest.raises(ConfigError, match=f"the model's chat template fails: .*{message}"):
        ChatTemplate(text, {}).render(MESSAGES)


def test_a_template_is_read_from_the_folder(tmp_path):
    assert read_template(tmp_path) is None
    config = {"chat_template": "from config", "bos_token": {"content": "<s>"}, "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_template(tmp_path) == ChatTemplate("from config", {"bos_token": "<s>"})
    several = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": "the default"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert read_template(tmp_path) == ChatTemplate("the default", {})
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert read_template(tmp_path) == ChatTemplate("from file", {})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        read_template(tmp_path)
