"""Conversations as data: the tokens and the targets are those of transformers, and bad input is a message."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshpar.data import Chat
from meshpar.data.chat.conversations import read
from meshpar.errors import ConfigError, DataError, DataWarning
from meshpar.experiment.config import Run
from tests.chats import CHATML, CITIES, UNMARKED, conversations, write_lines, write_tokenizer

LINES = conversations(12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    write_tokenizer(folder / "marked")
    write_tokenizer(folder / "unmarked", UNMARKED)
    write_lines(folder / "chats.jsonl", LINES)
    return folder


def chat(folder: Path, model: str = "marked", **settings: Any) -> Chat:
    settings = {
        "path": str(folder / "chats.jsonl"),
        "seq_len": 128,
        "batch_size": 4,
        "held_out_fraction": 0.3,
    } | settings
    return Chat(tokenizer=str(folder / model / "tokenizer.json"), **settings)


def theirs(folder: Path, messages: list[Any], **settings: Any) -> tuple[list[int], list[bool]]:
    """transformers' ids and mask of the assistant's tokens."""
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    made = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True, **settings)
    return made["input_ids"], [bool(one) for one in made["assistant_masks"]]


@pytest.mark.parametrize("model", ["marked", "unmarked"])
def test_the_targets_are_those_of_transformers(model, folder):
    """The template without marks renders the same text, so its targets must be the same."""
    found = chat(folder, model).examples()
    assert len(found) == len(LINES)
    for example, line in zip(found, LINES, strict=True):
        ids, learned = theirs(folder / "marked", line["messages"])
        assert example.encoded.ids.tolist() == ids
        assert example.encoded.is_learned.tolist() == learned


def test_rows_have_each_conversation_once_with_its_own_segment(folder):
    train, held_out = chat(folder).datasets(0)
    assert train.num_documents + held_out.num_documents == len(LINES)
    want = set()
    for line in LINES:
        ids, learned = theirs(folder / "marked", line["messages"])
        last = max(np.flatnonzero(learned))
        targets = [one if is_target else -1 for one, is_target in zip(ids[1:], learned[1:], strict=True)]
        want.add((tuple(ids[:last]), tuple(targets[:last])))
    seen = []
    for data in (train, held_out):
        for part in data.parts:
            batch = part.batch(np.arange(len(part)))
            for i in range(len(part)):
                for segment in range(1, batch["segments"][i].max() + 1):
                    of = batch["segments"][i] == segment
                    assert batch["positions"][i, of].tolist() == list(range(of.sum()))
                    seen.append((tuple(batch["tokens"][i, of].tolist()), tuple(batch["targets"][i, of].tolist())))
            assert (batch["targets"][batch["segments"] == 0] == -1).all()
    assert sorted(seen) == sorted(want)
    beyond = train.parts[0].batch([len(train.parts[0])])
    assert (beyond["segments"] == 0).all() and (beyond["targets"] == -1).all()


def test_the_model_learns_to_stop_and_nothing_after_it(folder):
    example = chat(folder, "unmarked").examples()[0]
    tokenizer = chat(folder).tokenizer
    learned = tokenizer._library.decode(example.encoded.ids[example.encoded.is_learned], skip_special_tokens=False)
    assert learned == "It is Paris.<|im_end|>  France is glad.\n<|im_end|>"


# a conversation beyond a row ----------------------------------------------------------------------------------------


def test_a_longer_conversation_is_refused_unless_declared(folder):
    with pytest.raises(
        DataError, match=r"chats.jsonl:1\n    has \d+ tokens, more than data.seq_len = 40\n    data.seq_len"
    ):
        chat(folder, seq_len=40).datasets(0)


@pytest.mark.parametrize(("if_longer", "done"), [("truncate", "truncated"), ("split", "split")])
def test_a_longer_conversation_is_cut_as_declared_and_counted(if_longer, done, folder):
    whole = chat(folder).examples()
    with pytest.warns(DataWarning, match=f"12 of 12 conversations are longer than data.seq_len = 64: {done}$"):
        cut = chat(folder, seq_len=64, if_longer=if_longer).examples()
    for one, other in zip(whole, cut, strict=True):
        tokens, targets = one.pieces[0]
        if if_longer == "truncate":
            assert [piece.targets.tolist() for piece in other.pieces] == [targets[:64].tolist()]
        else:
            joined = np.concatenate([piece.tokens for piece in other.pieces])
            assert joined.tolist() == tokens[len(tokens) - len(joined) :].tolist()
            assert sum((piece.targets >= 0).sum() for piece in other.pieces) == (targets >= 0).sum()


def test_longer_conversations_are_left_out_as_declared_and_counted(folder, tmp_path):
    long = {"messages": [{"role": "user", "content": "x " * 300}, {"role": "assistant", "content": "y"}]}
    path = write_lines(tmp_path / "mixed.jsonl", [long, *LINES])
    with pytest.warns(DataWarning, match=r"1 of 13 conversations are longer than data.seq_len = 128: left out$"):
        assert len(chat(folder, path=str(path), if_longer="drop").examples()) == 12
    with pytest.warns(DataWarning, match=r"1 of 13 .*: truncated; 1 of 13 have no target left$"):
        assert len(chat(folder, path=str(path), if_longer="truncate").examples()) == 12


# the forms ----------------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}
CALL = {"function": {"name": "add", "arguments": {"a": 2}}}


@pytest.mark.parametrize(
    ("line", "messages", "learned"),
    [
        ({"messages": [USER, ANSWER]}, [USER, ANSWER], [False, True]),
        ({"prompt": "2 + 2?", "completion": "4"}, [USER, ANSWER], [False, True]),
        ({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, [USER, ANSWER] * 2, [False] * 3 + [True]),
        ({"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
         [USER, ANSWER], [False, True]),
        ({"messages": [USER, ANSWER | {"weight": 0}, USER, ANSWER]}, [USER, ANSWER] * 2, [False] * 3 + [True]),
        ({"messages": [USER | {"content": [{"type": "text", "text": "2 + 2?"}]}, ANSWER]}, [USER, ANSWER],
         [False, True]),
        ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls":
                              [{"function": {"name": "add", "arguments": '{"a": 2}'}}]}]},
         [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], [False, True]),
        ({"system": "Hi", "conversations": [{"from": "human", "value": "2 + 2?"},
                                            {"from": "function_call", "value": json.dumps(CALL["function"])},
                                            {"from": "observation", "value": "4"}, {"from": "gpt", "value": "4"}]},
         [{"role": "system", "content": "Hi"}, USER,
          {"role": "assistant", "content": "", "tool_calls": [{"type": "function"} | CALL]},
          {"role": "tool", "content": "4"}, ANSWER], [False, False, True, False, True]),
    ],
)  # fmt: skip
def test_each_form_is_read(line, messages, learned):
    found = read(line)
    assert (found.messages, found.is_learned) == (messages, learned)


def test_tools_may_be_json_text():
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert read({"messages": [USER, ANSWER], "tools": json.dumps(tools)}).tools == tools
    assert read({"messages": [USER, ANSWER], "tools": []}).tools is None


# bad input ----------------------------------------------------------------------------------------------------------

WRONG = [
    ({"messages": [USER]}, "has no message of the assistant to learn from: user"),
    (
        {"messages": [{"role": "assistant1", "content": "4"}]},
        "message 1 has the unknown role 'assistant1'\n    assistant?",
    ),
    ({"messages": [USER, {"role": "assistant"}]}, "message 2 has neither content nor tool_calls"),
    ({"messages": "hi"}, "its 'messages' is no list of objects"),
    ({"massages": [USER]}, "rename massages to messages"),
    ({"messages": [USER | {"content": [{"type": "image"}]}, ANSWER]}, "message 1 has a part of type 'image'"),
    ({"messages": [USER, ANSWER | {"content": "<|im_end|>"}]}, r"message 2 contains '<\|im_end\|>', a special token"),
    ({"messages": [USER, ANSWER], "tools": "no"}, "tools: no JSON list"),
    ({"conversations": [{"from": "hunan", "value": ""}]}, "has a turn from 'hunan', who is unknown\n    human"),
    ([1], "is not a JSON object"),
]


def test_all_problems_of_a_file_are_reported_at_once(folder, tmp_path):
    path = write_lines(tmp_path / "wrong.jsonl", [line for line, _ in WRONG[:9]])
    with pytest.raises(DataError) as raised:
        chat(folder, path=str(path)).datasets(0)
    for number, (_, what) in enumerate(WRONG[:9], 1):
        assert f"wrong.jsonl:{number}\n" in str(raised.value)
        assert re.search(what, str(raised.value)), what


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
READS = "{{ messages.__class__.__mro__ }}"
TEMPLATES = {
    "{% set n = 20000000 %}{{ 'x' * n }}": "writes more than 10000000 characters",
    "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}": "writes more than 10000000 characters",
    "{% set n = 9 ** 99 %}{{ 9 ** n }}": "takes (too much memory|longer than)",
    "{{ 'x' * 9999999999 }}": "takes too much memory",
    "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}":
        "takes (too much memory|longer than)",
    "{{ 'x'.ljust(9999999999) }}": "takes too much memory",
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}?{% endif %}":
        "does not write an answer after the prompt that asks for it: message 3 is",
    "{% for m in messages %}{{ m.role if loop.last else '' }}{{ m.content }}{% endfor %}":
        "does not write an answer after the prompt",
    "{{ strftime_now('%Y') }}": r"may write the date of today.*\n.*data.date=",
    CHATML.replace("'assistant' %}", "'nobody' %}"): "the template marks nothing of it as generated",
}  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_cannot_be_used_is_an_error(template, folder, tmp_path, monkeypatch):
    from meshpar.data.chat import sandbox

    monkeypatch.setattr(sandbox, "LONGEST_S", 0.3)
    monkeypatch.setattr("meshpar.data.reading.MOST_PROBLEMS", 1)
    model = write_tokenizer(tmp_path / "model", template)
    with pytest.raises(DataError, match=TEMPLATES[template]):
        chat(folder).model_copy(update={"tokenizer": chat(tmp_path, "model").tokenizer}).datasets(0)
    assert model.is_dir()


def test_no_template_is_an_error(folder, tmp_path):
    write_tokenizer(tmp_path / "model", None)
    with pytest.raises(DataError, match="there is no chat template beside it"):
        chat(tmp_path, "model", path=str(folder / "chats.jsonl")).datasets(0)


THINKING = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_answers_that_are_written_otherwise_later_are_learned_apart(folder, tmp_path):
    """As Qwen 3's template, which removes the thoughts of earlier answers."""
    write_tokenizer(tmp_path / "model", THINKING)
    data = chat(tmp_path, "model", path=str(folder / "chats.jsonl"))
    with pytest.raises(
        DataError, match=r"in another way when the conversation goes on: .*think.*\n.*data.answers=apart"
    ):
        data.datasets(0)
    found = data.model_copy(update={"answers": "apart"}).examples()
    assert len(found) == 2 * len(LINES)
    decode = data.tokenizer._library.decode
    texts = [decode(one.encoded.ids[one.encoded.is_learned], skip_special_tokens=False) for one in found[:2]]
    assert texts == ["<think></think>It is Paris.<|im_end|>", "<think></think>  France is glad.\n<|im_end|>"]
    assert "<think>" not in decode(found[1].encoded.ids, skip_special_tokens=False).partition("Thanks")[0]


def test_the_date_and_the_options_of_a_template_are_those_of_the_config(folder, tmp_path):
    write_tokenizer(tmp_path / "model", "{{ strftime_now('%d %b %Y') }} {{ mood }}" + UNMARKED)
    data = chat(
        tmp_path, "model", path=str(folder / "chats.jsonl"), date="2026-11-26", template_options={"mood": "calm"}
    )
    ids = data.examples()[0].encoded.ids
    assert data.tokenizer.decode(ids).startswith("26 Nov 2026 calm")
    with pytest.raises(DataError, match=r"mod: changes nothing in the template\n *leave it out"):
        data.model_copy(update={"template_options": {"mod": "calm"}}).examples()
    with pytest.raises(ConfigError, match=r"'today' is no date such as 2026-11-26"):
        chat(folder, date="today")


def test_a_template_that_does_not_teach_to_stop_is_warned_of(folder, tmp_path):
    marked = CHATML.replace("{{ message.content + '<|im_end|>' }}{% endgeneration %}",
                            "{{ message.content }}{% endgeneration %}<|im_end|>")  # fmt: skip
    write_tokenizer(tmp_path / "model", marked)
    with pytest.warns(DataWarning, match="it does not learn to stop"):
        chat(tmp_path, "model", path=str(folder / "chats.jsonl")).examples()


FAULTS = {
    "marked": ({"messages": [USER]}, "faults.jsonl:1", "has no message of the assistant"),
    "unmarked": ({"messages": [USER | {"role": "robot"}, ANSWER]}, "faults.jsonl:1", "has the unknown role 'robot'"),
    "loops": ({"messages": [USER, ANSWER]}, "", "takes longer than 0.3 s"),
    "reads": ({"messages": [USER, ANSWER]}, "", "unsafe"),
}
"""Model -> a line, where the fault is, and what it is."""


@pytest.mark.parametrize("model", FAULTS)
def test_a_fault_ends_with_exit_code_2_and_a_message(model, folder, tmp_path, command, monkeypatch):
    monkeypatch.setattr("meshpar.data.chat.sandbox.LONGEST_S", 0.3)
    line, where, what = FAULTS[model]
    write_tokenizer(folder / "loops", LOOPS)
    write_tokenizer(folder / "reads", READS)
    path = write_lines(tmp_path / "faults.jsonl", [line])
    (tmp_path / "chat.yaml").write_text(RUN)
    tokenizer = f"data.tokenizer={folder / model / 'tokenizer.json'}"
    said = command("data", "show", tmp_path / "chat.yaml", f"data.path={path}", tokenizer)
    assert said.code == 2
    assert where in said.err and what in said.err and "Traceback" not in said.err


SIZES = {"kind": "llama", "num_layers": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32}
OF_RUN: dict[str, Any] = {"model": SIZES, "optim": {"kind": "adamw", "lr": 1e-2}, "num_steps": 2}


@pytest.mark.parametrize("kind", ["chat", "preferences", "prompts", "mixture"])
def test_conversations_have_the_tokenizer_of_the_model_of_init(kind, folder, tmp_path):
    data: dict[str, Any] = {"kind": kind, "path": "chats.jsonl"}
    if kind == "mixture":
        data = {"kind": kind, "parts": [{"weight": 1, "data": data | {"kind": "chat"}}]}
    run = OF_RUN | {"data": data, "run_dir": str(tmp_path)}
    of_model = {"from_hf": str(folder / "marked")}
    assert Run(**run, init=of_model).data.tokenizer.path == str(folder / "marked" / "tokenizer.json")
    if kind == "chat":
        own = {"tokenizer": str(folder / "unmarked" / "tokenizer.json")}
        assert Run(**run | {"data": data | own}, init=of_model).data.tokenizer.path == own["tokenizer"]
    for init in (None, {"from_hf": str(folder)}):
        with pytest.raises(
            ConfigError, match=r"required, but missing\n.*data\.tokenizer=FOLDER/tokenizer\.json; or an"
        ):
            Run(**run, init=init)
    write_tokenizer(tmp_path / "hugging_face")  # where a run keeps the files of its model
    assert Run(**run, init={"from_hf": "gone"}).data.tokenizer.path == str(tmp_path / "hugging_face/tokenizer.json")


# what a person sees -------------------------------------------------------------------------------------------------

RUN = """\
model: {kind: llama, num_layers: 2, hidden_size: 16, num_heads: 2, intermediate_size: 32, vocab_size: 320}
data: {kind: chat, path: chats.jsonl, tokenizer: marked/tokenizer.json, seq_len: 128, held_out_fraction: 0.3}
optim: {kind: adamw, lr: 1e-2}
num_steps: 2
run_dir: run
"""


def test_show_prints_a_row_with_what_is_learned(folder, command, monkeypatch):
    monkeypatch.chdir(folder)
    Path("chat.yaml").write_text(RUN)
    said = command("data", "show", "chat.yaml", "--row", "1")
    assert said.code == 0, said.err
    assert "<|im_start|>user\nThanks, naïve guide!<|im_end|>\n<|im_start|>assistant\n⟦" in said.out
    marked = re.findall("⟦(.*?)⟧", said.out, re.DOTALL)
    texts = {f"It is {city}.<|im_end|>" for city in CITIES.values()}
    texts |= {f"  {country} is glad.\n<|im_end|>" for country in CITIES}
    assert marked and {*marked} <= texts
    parts = json.loads(command("data", "show", "chat.yaml", "--row", "1", "--json").out)["documents"]
    assert [part["text"] for parts in parts for part in parts if part["is_learned"]] == marked
    assert command("data", "show", "chat.yaml", "data.seq_len=10").code == 2
    assert "--row 99: an epoch has the rows 0 to" in command("data", "show", "chat.yaml", "--row", "99").err


def test_show_prints_rows_of_text(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for number in range(4):
        Path(f"texts/{number}.txt").write_text(f"one\x1b line {number}")
    text = "{kind: text, path: texts, batch_size: 1, seq_len: 64, held_out_fraction: 0.7}"
    Path("text.yaml").write_text(re.sub("data: .*", f"data: {text}", RUN))
    assert re.search(r"⟦one\\x1b line \d⟧", command("data", "show", "text.yaml").out)
