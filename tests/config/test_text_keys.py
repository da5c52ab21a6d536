"""No name or path of a config can command a terminal, or become a line of its own in a script or a log."""

from __future__ import annotations

import pytest

from meshpar import Run
from meshpar.errors import ConfigError, control_character, printable
from tests.config.keys import text_keys

CONTROL = ("\n", "\r", "\t", "\0", "\x1b[2J", "\x7f", "\x85", "\x9b", "\u2028", "\u2029", "\u202e", "\u2066", "\udcff")
OPAQUE = {"bos_token", "eos_token", "arguments", "template_options"}
"""Tokens, which are looked up in a tokenizer, and data of the user's own code."""
KEYS = {str(key): key for key in text_keys()}


def test_the_keys_are_those_of_the_schema():
    assert {"run_dir", "data.path of jsonl", "loggers.0.name of wandb", "parallel.pipeline.path of written"} < set(KEYS)
    assert len(KEYS) > 60


@pytest.mark.parametrize("name", KEYS)
def test_a_control_character_is_refused_by_the_name_of_its_key(name):
    key = KEYS[name]
    for control in CONTROL:
        text = f"a{control}b"
        if key.name in OPAQUE:
            Run(**key.data(text))
            continue
        with pytest.raises(ConfigError) as refused:
            Run(**key.data(text))
        section = ".".join(map(str, key.at[:-1])) or key.name
        assert section in str(refused.value)
        assert not control_character(str(refused.value).replace("\n", ""))


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if key.at in {("run_dir",), ("data", "path")}])
def test_paths_of_every_language_and_with_quotes_are_valid(name):
    for text in ("my run", "größe", "模型", "نیم\u200cفاصله", "a\u3000b", "it's", 'a "b"', "$(x) `y` #1 %j \\"):
        Run(**KEYS[name].data(text))


def test_what_is_said_escapes_control_characters(capsys):
    from meshpar.progress import say

    say("run/\x1b]0;owned\x07 is written\nnext: \x9b2J")
    assert capsys.readouterr().err == "run/\\x1b]0;owned\\x07 is written\nnext: \\x9b2J\n"
    assert printable("\u202e") == "\\u202e"


def test_a_record_is_one_line_without_markup_and_escapes(capsys, monkeypatch):
    from meshpar.records import terminal

    record = {"kind": "evaluation", "step": 2, "loss": 1.0, "[red]mine\x1b[2J": 3.0}
    with terminal.shown(5) as show:
        show(record)
    assert "[red]mine\\x1b[2J 3" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with terminal.shown(5) as show:
        show(record)
    assert "[red]mine\\x1b[2J 3" in capsys.readouterr().out
