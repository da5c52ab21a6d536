"""Answers that follow a grammar, and calls of tools, as OpenAI's client asks for them. The model has random weights."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import jsonschema
import openai
import pytest

from meshpar.data.chat.template import ChatTemplate
from meshpar.errors import ConfigError
from meshpar.serve.answer import Answer, AnswerPiece
from meshpar.serve.constraint import Grammars
from meshpar.serve.http.logprobs import Texts
from meshpar.serve.http.shapes import ChatShape, Toolbox
from meshpar.serve.http.tools import Form, Hermes, Llama3, Mistral, form_of, read_calls
from meshpar.serve.open_engine import open_engine
from meshpar.serve.scheduler import Request
from meshpar.serve.source import open_source
from tests.chats import UNMARKED, write_tokenizer
from tests.interop.pretrained import SIZES, saved_with
from tests.serve.client import serving

MESH = ["mesh.data=2", "mesh.tensor=4", "rules=[megatron]", "rules.kv_heads=[]"]
TOOLS_TEXT = """\
{% if tools %}{% for tool in tools %}{{ tool.function.name }}: {{ tool | tojson }}
{% endfor %}<tool_call>{% endif %}"""
CONFIG: dict[str, Any] = {
    **SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "bos_token_id": 0,
    "eos_token_id": 2, "tie_word_embeddings": True, "rope_theta": 1e4, "max_position_embeddings": 512,
}  # fmt: skip
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["city", "is_big", "size"],
    "properties": {"city": {"enum": ["Lima", "Rome"]}, "is_big": {"type": "boolean"},
                   "size": {"type": "string", "pattern": "^[0-9]{2}$"}},
}  # fmt: skip
WEATHER = {
    "type": "object", "additionalProperties": False, "required": ["city"],
    "properties": {"city": {"enum": ["Lima", "Rome"]}},
}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
MESSAGES: Any = [{"role": "user", "content": "Where?"}]
CALLED: Any = [
    *MESSAGES,
    {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "noon"},
]


class Served:
    """A model with 300 tokens and random weights, on eight devices."""

    def __init__(self, folder: Path):
        self.source = open_source(folder, MESH)
        self.engine = open_engine(self.source, slots=4, max_len=512, page_size=16, chunk=64)

    def ask(self, scene: Callable[[openai.AsyncOpenAI], Any]) -> Any:
        async def inside() -> Any:
            async with serving(self.engine, self.source) as server:
                transport = httpx2.ASGITransport(app=server.app)
                client = httpx2.AsyncClient(transport=transport)
                async with openai.AsyncOpenAI(
                    base_url="http://server/v1", api_key="none", http_client=client, max_retries=0
                ) as asking:
                    return await scene(asking)

        return asyncio.run(inside())

    def chat(self, messages: Any = MESSAGES, **settings: Any) -> Any:
        return self.ask(lambda client: client.chat.completions.create(model="tiny", messages=messages, **settings))

    def refusal(self, messages: Any = MESSAGES, **settings: Any) -> str:
        with pytest.raises(openai.BadRequestError) as found:
            self.chat(messages, **settings)
        return found.value.body["message"]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Served:
    folder = saved_with(CONFIG, tmp_path_factory.mktemp("models") / "tiny")
    write_tokenizer(folder, TOOLS_TEXT + UNMARKED.replace("message.content", "(message.content or '')"))
    return Served(folder)


def test_an_answer_follows_its_schema_greedy_sampled_streamed_and_several(served):
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}

    async def scene(client: openai.AsyncOpenAI) -> list[str]:
        create = client.chat.completions.create
        asked: Any = {"model": "tiny", "messages": MESSAGES, "response_format": form, "max_tokens": 200}
        whole = await create(**asked, temperature=0)
        several = await create(**asked, temperature=1, seed=1, n=3)
        streamed = await create(**asked, temperature=0, stream=True)
        texts = [one.message.content for one in [*whole.choices, *several.choices]]
        assert {one.finish_reason for one in [*whole.choices, *several.choices]} == {"stop"}
        return [*texts, "".join([event.choices[0].delta.content or "" async for event in streamed])]

    texts = served.ask(scene)
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert texts[-1] == texts[0]
    assert len(set(texts)) > 1
    free = served.chat(temperature=0, max_tokens=20).choices[0].message.content
    with pytest.raises(ValueError, match=r"Expecting|Extra"):
        json.loads(free)  # without the grammar the answer is another one


def test_json_objects_expressions_and_grammars(served):
    text = served.chat(response_format={"type": "json_object"}, temperature=0, max_tokens=300, logit_bias={"1": -100})
    assert text.choices[0].message.content.startswith("{")

    def completed(**structured: Any) -> str:
        body = {"structured_outputs": structured}
        create = lambda client: client.completions.create(
            model="tiny", prompt="It is", temperature=0, max_tokens=40, extra_body=body
        )
        choice = served.ask(create).choices[0]
        assert choice.finish_reason == "stop"
        return choice.text

    assert completed(regex="(Lima|Rome)!{3}") in ("Lima!!!", "Rome!!!")
    assert completed(grammar='start: "x" ("y" | "z") "!"') in ("xy!", "xz!")
    assert completed(json={"const": [1, 2]}).replace(" ", "") == "[1,2]"


def test_a_grammar_with_an_error_is_refused_and_one_that_explodes_ends(served):
    ask = lambda **structured: served.refusal(extra_body={"structured_outputs": structured})
    assert "the grammar cannot be followed" in ask(regex="(")
    assert "lookahead" in ask(regex="(?=x)y").replace("look-around", "lookahead")
    assert "unknown name" in ask(grammar="start: x")
    assert 'Unimplemented keys: ["uniqueItems"]' in ask(json={"type": "array", "uniqueItems": True})
    assert "has one key" in ask(regex="a", grammar="b")
    start = time.monotonic()
    for heavy in ("((a{1,1000}){1,1000}b){1,1000}", "(a|b)*a(a|b){400}"):
        with suppress(openai.BadRequestError):
            served.chat(extra_body={"structured_outputs": {"regex": heavy}}, max_tokens=3, temperature=0)
    assert time.monotonic() - start < 60


NESTED: Any = {"type": "string"}
for _ in range(100):
    NESTED = {"type": "array", "items": NESTED}
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"grammar": "start: start"}, "it matches no text"),
    ({"grammar": "start: a\na: b\nb: a"}, "it matches no text"),
    ({"grammar": "%import /etc/passwd\nstart: x"}, "cannot be followed"),
    ({"grammar": "start: <[999999]>"}, "too large"),
    ({"json": {"enum": []}}, "cannot be followed"),
    ({"json": {"$ref": "file:///etc/passwd"}}, "cannot be followed"),
    ({"json": {"$ref": "http://127.0.0.1:9/schema"}}, "cannot be followed"),
    ({"json": {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"allOf": [{"type": "string"}, {"type": "number"}]}}, "cannot be followed"),
    ({"json": NESTED}, ""),
]


@pytest.mark.parametrize("case", range(len(HOSTILE)))
def test_a_grammar_that_nothing_follows_or_that_reads_files_is_refused(case, served):
    structured, message = HOSTILE[case]
    if message:
        assert message in served.refusal(extra_body={"structured_outputs": structured})
    else:
        served.chat(extra_body={"structured_outputs": structured}, max_tokens=2)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_must_call_a_tool(stream, served):
    named = {"type": "function", "function": {"name": "weather"}}
    asked: Any = {"tools": TOOLS, "tool_choice": named, "temperature": 0, "max_tokens": 200}

    async def streamed(client: openai.AsyncOpenAI) -> Any:
        events = await client.chat.completions.create(model="tiny", messages=MESSAGES, **asked, stream=True)
        parts = [event.choices[0] async for event in events]
        assert "".join(part.delta.content or "" for part in parts) == ""
        return [call for part in parts for call in part.delta.tool_calls or ()], parts[-1].finish_reason

    if stream:
        calls, finish = served.ask(streamed)
    else:
        choice = served.chat(**asked).choices[0]
        assert choice.message.content is None
        calls, finish = choice.message.tool_calls, choice.finish_reason
    assert [call.function.name for call in calls] == ["weather"]
    jsonschema.validate(json.loads(calls[0].function.arguments), WEATHER)
    assert finish == "tool_calls"


def test_tools_and_calls_are_rendered_by_the_template(served):
    base = served.chat(max_tokens=1).usage.prompt_tokens
    assert served.chat(max_tokens=1, tools=TOOLS).usage.prompt_tokens > base + 40
    assert served.chat(CALLED, max_tokens=1, tools=TOOLS, tool_choice="none").choices[0].finish_reason == "length"
    wrong = [
        *CALLED[:1],
        {**CALLED[1], "tool_calls": [{**CALLED[1]["tool_calls"][0], "function": {"name": "f", "arguments": "["}}]},
    ]
    assert "the arguments of f: no JSON object" in served.refusal(wrong)
    assert "no tool is called 'g'" in served.refusal(
        tools=TOOLS, tool_choice={"type": "function", "function": {"name": "g"}}
    )
    assert "required needs tools" in served.refusal(tool_choice="required")
    both = {"response_format": {"type": "json_object"}, "tools": TOOLS, "tool_choice": "required"}
    assert "follows one of" in served.refusal(**both)


@pytest.fixture
def tokenizer(served) -> Any:
    return served.source.tokenizer


TEMPLATES = {
    "<tool_call>{{ tools }}": Hermes, "[TOOL_CALLS]{{ tools }}": Mistral, "{{ tools }}": None, "no": None,
    '{{ tools }} respond with {"name": function name, "parameters": dictionary}': Llama3,
}  # fmt: skip


@pytest.mark.parametrize("text", TEMPLATES)
def test_the_form_of_calls_is_that_of_the_template(text):
    found, kind = form_of(ChatTemplate(text, {})), TEMPLATES[text]
    assert found is None if kind is None else isinstance(found, kind)


ONE = {"Lima": '{"city": "Lima"}'}
WRITTEN: dict[str, tuple[Form, str, tuple[str, int]]] = {
    "hermes": (Hermes(), 'So: <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', ("So:", 1)),
    "two": (
        Hermes(),
        '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        ("", 2),
    ),
    "cut": (Hermes(), '<tool_call>{"name": "f", "argu', ('<tool_call>{"name": "f", "argu', 0)),
    "of nobody": (Hermes(), '<tool_call>{"name": "g"}</tool_call>', ('<tool_call>{"name": "g"}</tool_call>', 0)),
    "llama": (Llama3(), '<|python_tag|>{"name": "f", "parameters": {"x": 1}}', ("", 1)),
    "llamas": (Llama3(), '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}', ("", 2)),
    "text": (Llama3(), "It is noon.", ("It is noon.", 0)),
    "mistral": (Mistral(), 'Well [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]', ("Well", 1)),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_calls_are_read_in_each_form(case):
    form, text, (content, number) = WRITTEN[case]
    found, calls = read_calls(form, text, ["f"], is_parallel=True)
    assert (found, len(calls)) == (content, number)
    assert len(read_calls(form, text, ["f"], is_parallel=False)[1]) == min(1, number)
    begins = [form.begin(text[:n]) for n in range(1, len(text) + 1)]
    assert all(a <= b for a, b in pairwise(begins)), "what was sent is not taken back"


@pytest.mark.parametrize("stop", [(), ("STOP",)])
@pytest.mark.parametrize("case", WRITTEN)
def test_streamed_parts_join_to_the_whole_answer(case, stop, tokenizer):
    """With characters of several tokens, and texts that may be the beginning of a stop string or of a call."""
    form, text, (_, number) = WRITTEN[case]
    text = f"né STO 模 {text} STOP, never" if stop else text
    request = Request(prompt=tokenizer.encode("Where?").tolist(), max_tokens=500)
    toolbox = Toolbox(form, ("f",), True, frozenset())
    shape = ChatShape("m", Texts(tokenizer, None), toolbox)
    answer = Answer(tokenizer, stop, 500, (), request.prompt)
    answers: Any = SimpleNamespace(answers=[answer], requests=[request])
    tokens = tokenizer.encode(text).tolist()
    deltas = []
    for i, token in enumerate(tokens):
        piece = answer.add(token)
        answer.finish = answer.finish or ("end" if i == len(tokens) - 1 else None)
        deltas.append(shape.delta(AnswerPiece(0, piece, answer.finish, i), answers, 0)["delta"])
        if answer.finish:
            break
    whole = shape.choice(0, answers)["message"]
    assert "".join(delta["content"] for delta in deltas) == (whole["content"] or "")
    assert len(deltas[-1].get("tool_calls", ())) == len(whole.get("tool_calls", ()))
    assert stop or len(whole.get("tool_calls", ())) == number
    assert "STOP" not in (whole["content"] or "")


def test_the_texts_of_marks_are_kept_and_of_other_special_tokens_dropped(tokenizer):
    eos, a = tokenizer.eos, tokenizer.encode("a").tolist()
    assert tokenizer.decode_keeping([*a, eos, *a], {eos}) == tokenizer.decode_special([*a, eos, *a])
    assert tokenizer.decode_keeping([*a, eos, *a], {a[0]}) == tokenizer.decode([*a, *a])


def test_a_special_token_that_opens_calls_is_a_part_of_the_answer(served, tmp_path, monkeypatch):
    """As [TOOL_CALLS] of Mistral. Its text is <|im_start|> here, and a bias makes the model write nothing else."""
    monkeypatch.setattr(Hermes, "opener", "<|im_start|>")
    write_tokenizer(tmp_path, "{% if tools %}<|im_start|>{{ tools | tojson }}{% endif %}" + UNMARKED)
    monkeypatch.setattr(served, "source", replace(served.source, folder=tmp_path))
    asked: Any = {"temperature": 0, "max_tokens": 3, "logit_bias": {"1": 100}}
    assert served.chat(tools=TOOLS[:1], **asked).choices[0].message.content == 3 * "<|im_start|>"


@pytest.mark.parametrize("form", [Hermes(), Llama3(), Mistral()])
def test_the_grammar_of_a_call_is_read_back(form, served):
    from llguidance import LLMatcher

    grammars = Grammars(served.source.tokenizer, 320, {2})
    tools = [tool["function"] for tool in TOOLS]
    text = form.grammar(tools, {})
    grammars.of_lark(text)
    written = {
        Hermes: '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        Llama3: '{"name": "now", "parameters": {}}',
        Mistral: '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
    }[type(form)]
    matcher = LLMatcher(grammars.tokens, text)
    assert matcher.consume_tokens(served.source.tokenizer.encode(written).tolist())
    assert matcher.is_accepting()
    assert len(read_calls(form, written, ["now"], is_parallel=True)[1]) == 1
    other = LLMatcher(grammars.tokens, text, log_level=0)
    assert not other.consume_tokens(served.source.tokenizer.encode(written.replace("now", "nox")).tolist())


SPECIAL = {"<tool_call>": 1, "[TOOL_CALLS]": 1}
"""Openers that are special tokens; the text of token 1 is <|im_start|> here."""
CALLS = {
    Hermes: '<tool_call>\n{"name": "weather", "arguments": CITY}\n</tool_call>',
    Llama3: '{"name": "weather", "parameters": CITY}',
    Mistral: '[TOOL_CALLS][{"name": "weather", "arguments": CITY}]',
}


@pytest.mark.parametrize("special", [{}, SPECIAL], ids=["texts", "special tokens"])
@pytest.mark.parametrize("form", [Hermes(), Llama3(), Mistral()])
def test_arguments_of_a_strict_function_follow_its_schema_once_a_call_begins(form, special, served):
    from llguidance import LLMatcher

    grammars = Grammars(served.source.tokenizer, 320, {2})
    weather, now = (tool["function"] for tool in TOOLS)
    text = form.grammar_of_text([weather | {"strict": True}, now], special)
    grammars.of_lark(text)

    def follows(answer: str) -> bool:
        ids: list[int] = []
        for i, part in enumerate(answer.split(form.opener) if form.opener in special else [answer]):
            ids += ([special[form.opener]] if i else []) + served.source.tokenizer.encode(part).tolist()
        matcher = LLMatcher(grammars.tokens, text, log_level=0)
        return bool(matcher.consume_tokens(ids)) and matcher.is_accepting()

    call = CALLS[type(form)]
    right, wrong = (call.replace("CITY", one) for one in ('{"city": "Lima"}', '{"city": "Oslo"}'))
    free = call.replace("weather", "now").replace("CITY", '{"any": [1]}')
    assert follows("") and follows("It rains, {1} <b> or [2].") and follows(right) and follows(free)
    assert not follows(wrong) and not follows(right[:-1]) and not follows(call.replace("weather", "f"))
    before = "" if isinstance(form, Llama3) else "I look.\n"
    more = {Hermes: f"{right}\nand {free} Yes.", Llama3: f"{right}; {free}", Mistral: right}[type(form)]
    assert follows(before + more)
    assert not follows(before + more.replace(right, wrong))
    _, calls = read_calls(form, before + more, ["weather", "now"], is_parallel=True)
    assert len(calls) == (1 if isinstance(form, Mistral) else 2)


LLAMA3 = """\
{% if tools %}Respond with {"name": function name, "parameters": arguments}. {{ tools | tojson }}{% endif %}"""


def test_a_strict_function_limits_calls_that_the_model_chooses_to_write(served, tmp_path, monkeypatch):
    """The model has random weights, and a bias to begin a call of Llama 3 and to end the answer where it may."""
    write_tokenizer(tmp_path, LLAMA3 + UNMARKED)
    monkeypatch.setattr(served, "source", replace(served.source, folder=tmp_path))
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    opener = served.source.tokenizer.encode("{").tolist()[0]
    asked: Any = {"temperature": 0, "max_tokens": 200, "logit_bias": {str(opener): 100, "2": 50}}
    choice = served.chat(tools=strict, **asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    jsonschema.validate(json.loads(choice.message.tool_calls[0].function.arguments), WEATHER)
    control = served.chat(tools=TOOLS[:1], **asked).choices[0]
    assert (control.finish_reason, control.message.content[:3]) == ("length", "{{{")
    both = {"response_format": {"type": "json_object"}, "tools": strict}
    assert "strict functions" in served.refusal(**both)


REPEATS: Any = [{"role": "user", "content": "aaaa bbbb aaaa bbbb aaaa"}]
FORM: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}


def together(served: Served, engine: Any) -> tuple[list[str], int]:
    """Four requests at once, two of them with a grammar: their answers, and how many drafts were accepted."""

    async def scene() -> tuple[list[str], int]:
        async with serving(engine, served.source) as server:
            transport = httpx2.ASGITransport(app=server.app)
            client = httpx2.AsyncClient(transport=transport)
            async with openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=client) as asking:
                create: Any = asking.chat.completions.create
                asked: Any = {"model": "tiny", "temperature": 0, "max_tokens": 120}
                kinds = [
                    {},
                    {"response_format": FORM},
                    {},
                    {"extra_body": {"structured_outputs": {"regex": "(ab){20}"}}},
                ]
                found = await asyncio.gather(*(create(messages=REPEATS, **asked, **kind) for kind in kinds))
                text = (await client.get("http://server/metrics")).text
        accepted = re.search(r"meshpar_serve_accepted_drafts_total (\d+)", text)
        return [one.choices[0].message.content for one in found], int(accepted[1]) if accepted else 0

    return asyncio.run(scene())


@pytest.fixture(scope="module")
def drafting(served) -> Any:
    room = {"slots": 4, "max_len": 512, "page_size": 16, "chunk": 64}
    return open_engine(served.source, **room, ngrams=1, num_drafts=3)


@pytest.mark.slow
def test_rows_with_a_grammar_beside_rows_with_drafts_are_those_without_drafts(served, drafting):
    want, none = together(served, served.engine)
    found, accepted = together(served, drafting)
    assert (none, accepted > 20) == (0, True)
    assert found == want
    jsonschema.validate(json.loads(found[1]), SCHEMA)
    assert found[3] == "ab" * 20


@pytest.mark.slow
def test_planted_drafts_of_rows_with_a_grammar_are_seen(served, drafting, monkeypatch):
    """Each of their drafts would be checked with the mask of the first token, and one is accepted that breaks it."""
    together(served, drafting)
    monkeypatch.setattr("meshpar.serve.engine._depends_on_answer", lambda row: False)
    with pytest.raises(openai.BadRequestError, match="the grammar cannot be followed any more"):
        together(served, drafting)


@pytest.mark.parametrize("read", ["of_schema", "of_regex", "of_lark"])
def test_a_server_without_the_extra_says_what_to_install(read, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'meshpar\[structured\]'"):
        getattr(Grammars(tokenizer, 320, {2}), read)({} if read == "of_schema" else "a")


def test_a_model_without_ends_has_no_grammars(served):
    with pytest.raises(ConfigError, match="an id that ends an answer"):
        Grammars(served.source.tokenizer, 320, ()).of_lark('start: "a"')
