"""What a slow operation shows: lines above a spinner on a terminal, and nothing but its total elsewhere."""

from __future__ import annotations

import os
import sys

import pytest

from meshpar.progress import busy
from tests.waiting import read_until


def test_a_line_is_above_the_spinner_of_a_terminal(monkeypatch: pytest.MonkeyPatch):
    terminal, end = os.openpty()
    with monkeypatch.context() as patch, os.fdopen(end, "w") as stderr:
        patch.setenv("TERM", "xterm")
        patch.setattr(sys, "stderr", stderr)
        with busy("works", quiet=True) as show:
            show("[a] \x1b line")
            shown = read_until(terminal, b"line\r\n")
    os.close(terminal)
    before, line, _ = shown.partition(b"[a] \\x1b line\r\n")
    assert line
    assert b"works" not in before.rpartition(b"\x1b[2K")[2], "the spinner was erased"


def test_without_a_terminal_a_line_is_not_shown(capsys: pytest.CaptureFixture[str]):
    with busy("works") as show:
        show("a line")
    assert capsys.readouterr().err.startswith("works: 0.0 s")
