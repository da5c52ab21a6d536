"""While XLA compiles, its warnings on standard error are collected, and all else is passed on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from meshpar.inspection.program.compiling import compiling
from tests.waiting import read_until

WARNING = "W0101 [SPMD] Involuntary full rematerialization. {}\n"


def write(text: str) -> None:
    os.write(2, text.encode())


def test_warnings_are_collected_and_all_else_is_passed_on(capfd):
    with compiling() as warnings:
        write("before\n" + WARNING.format("one") + "after")
    assert warnings == [WARNING.format("one").strip()]
    assert capfd.readouterr().err == "before\nafter"


def test_on_a_terminal_a_line_replaces_the_bar_that_is_there():
    """XLA's messages do not stand in a spinner or a progress bar, which is drawn again below them."""
    terminal, end = os.openpty()
    stderr = os.dup(2)
    os.dup2(end, 2)
    try:
        write("a bar")
        with compiling():
            write("W0000 absl\n")
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(end)
    assert read_until(terminal, b"absl\r\n") == b"a bar\r\x1b[2KW0000 absl\r\n"
    os.close(terminal)


def test_warnings_after_compiling_are_not_collected(capfd):
    with compiling() as warnings:
        pass
    write(WARNING.format("late"))
    assert (warnings, capfd.readouterr().err) == ([], WARNING.format("late"))


def test_an_exception_restores_standard_error(capfd):
    def fails() -> None:
        with compiling():
            write("said\n")
            raise ValueError("in the midst")

    with pytest.raises(ValueError, match="in the midst"):
        fails()
    write("later\n")
    assert capfd.readouterr().err == "said\nlater\n"


def test_nested_compilations_collect_their_own_warnings():
    with compiling() as outer:
        write(WARNING.format("first"))
        with compiling() as inner:
            write(WARNING.format("second"))
    assert [text.split()[-1] for text in (*outer, *inner)] == ["first", "second"]


def test_threads_take_turns_and_leave_nothing_open():
    kept: dict[int, list[str]] = {}

    def compile_(number: int) -> None:
        with compiling() as warnings:
            write(WARNING.format(number))
        kept[number] = warnings

    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    open_before = files()
    threads = [threading.Thread(target=compile_, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept == {number: [WARNING.format(number).strip()] for number in range(8)}
    deadline = time.monotonic() + 10
    while files() > open_before and time.monotonic() < deadline:
        time.sleep(0.01)  # the listening threads close their files later
    assert files() <= open_before


def test_a_child_started_while_compiling_is_not_waited_for(capfd):
    with compiling():
        child = subprocess.Popen(["sh", "-c", "read line; echo from the child >&2"], stdin=subprocess.PIPE)
    child.communicate(b"go\n")
    deadline = time.monotonic() + 10
    output = ""
    while "child" not in output and time.monotonic() < deadline:
        output += capfd.readouterr().err
    assert output == "from the child\n"


DIES = """
import os, time
from meshpar.inspection.program.compiling import compiling
with compiling():
    os.write(2, b"last words\\n")
    time.sleep(1)  # as XLA, which prints its stack first
    os._exit(1)
"""
CLOSED = """
import os
from meshpar.inspection.program.compiling import compiling
os.close(2)
with compiling() as warnings:
    pass
print(warnings)
"""


def test_output_is_passed_on_though_the_process_dies():
    done = subprocess.run([sys.executable, "-c", DIES], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "last words\n")


def test_without_a_standard_error_no_warning_is_collected():
    done = subprocess.run([sys.executable, "-c", CLOSED], capture_output=True, text=True)
    assert done.stdout == "[]\n"
