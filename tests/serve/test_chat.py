"""Chat templates: what they render, what they cannot do, and that messages cannot contain special tokens."""

from __future__ import annotations

import json

import pytest

from meshpar.data.chat import sandbox
from meshpar.data.chat.template import ChatTemplate, read_template
from meshpar.data.tokenizer import TokenizerFile
from meshpar.errors import ConfigError, DataError
from meshpar.serve.http.chat import encode_chat
from tests.damage import at_most

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


def test_a_template_gets_no_method_past_the_sandbox_by_a_filter():
    """Jinja2 before 3.1.6 let `attr` do so (CVE-2025-27516): this would be `<class 'str'>`."""
    text = "{{ ('{0.__class__}' | attr('format'))(bos_token) }}"
    assert ChatTemplate(text, {"bos_token": "<s>"}).render(MESSAGES) == ""


def test_a_template_that_does_not_end_is_interrupted(tokenizer, monkeypatch):
    monkeypatch.setattr(sandbox, "LONGEST_S", 0.3)
    forever = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with at_most(20), pytest.raises(ConfigError, match=r"takes longer than 0\.3 s"):
        ChatTemplate(forever, {}).render(MESSAGES)
    with at_most(20), pytest.raises(ConfigError, match=r"takes longer than 0\.3 s"):
        encode_chat(tokenizer, ChatTemplate(forever, {}), MESSAGES)
    assert ChatTemplate(TEMPLATE, {"bos_token": "<s>"}).render(MESSAGES).startswith("<s>user")


FEATURES = {
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "trimmed generation": "a {%- generation -%} {{ messages[0].content }} {%- endgeneration -%} b",
    "tojson": "{{ messages | tojson(separators=(',', ':'), sort_keys=True) }}",
    "tojson of ASCII": "{{ {'b': '<né>', 'a': [1, none]} | tojson(ensure_ascii=True, indent=2) }}",
    "tojson as it is": "{{ {'b': '<né>', 'a': true} | tojson }}",
    "tokens": "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ mask_token is defined }}",
    "a namespace": "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}",
    "loop controls": "{% for m in messages %}{% continue %}{{ m.content }}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("named_in", ["tokenizer_config.json", "special_tokens_map.json", "both"])
@pytest.mark.parametrize("case", FEATURES)
def test_templates_render_as_in_transformers(case, named_in, tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "chat_template.jinja").write_text(FEATURES[case])
    named = {"bos_token": "<s>", "eos_token": {"content": "<end>", "__type": "AddedToken"}}
    other = {"bos_token": "<end>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    in_config = {"tokenizer_config.json": named, "special_tokens_map.json": {}, "both": other}[named_in]
    named = {"bos_token": "<s>", "eos_token": {"content": "<end>"}}
    in_map = {"tokenizer_config.json": None, "special_tokens_map.json": named, "both": named}[named_in]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | in_config))
    if in_map is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(in_map))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    want = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    template = read_template(tmp_path)
    assert template is not None
    assert template.render(MESSAGES) == want


def test_a_template_is_read_from_the_folder(tmp_path):
    assert read_template(tmp_path) is None
    config = {"chat_template": "from config", "bos_token": {"content": "<s>"}, "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_template(tmp_path) == ChatTemplate("from config", {"bos_token": "<s>"})
    several = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": "the default"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert read_template(tmp_path) == ChatTemplate("the default", {}, tool_use="other")
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert read_template(tmp_path) == ChatTemplate("from file", {})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"chat_template\.jinja"):
        read_template(tmp_path)
