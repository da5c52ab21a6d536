"""What passes through standard error while XLA compiles: its warnings are kept, all else comes out."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from meshpar.inspection.program.compiling import compiling

SAYS = "W0101 [SPMD] Involuntary full rematerialization. {}\n"


def write(text: str) -> None:
    os.write(2, text.encode())


def test_warnings_are_kept_and_all_else_comes_out(capfd):
    with compiling() as warnings:
        write("before\n" + SAYS.format("one") + "after")
    assert warnings == [SAYS.format("one").strip()]
    assert capfd.readouterr().err == "before\nafter"


def test_afterwards_nothing_is_kept(capfd):
    with compiling() as warnings:
        pass
    write(SAYS.format("late"))
    assert (warnings, capfd.readouterr().err) == ([], SAYS.format("late"))


def test_an_exception_puts_everything_back(capfd):
    def fails() -> None:
        with compiling():
            write("said\n")
            raise ValueError("in the midst")

    with pytest.raises(ValueError, match="in the midst"):
        fails()
    write("later\n")
    assert capfd.readouterr().err == "said\nlater\n"


def test_one_within_another_keeps_its_own():
    with compiling() as outer:
        write(SAYS.format("first"))
        with compiling() as inner:
            write(SAYS.format("second"))
    assert [text.split()[-1] for text in (*outer, *inner)] == ["first", "second"]


def test_threads_take_turns_and_leave_nothing_open():
    kept: dict[int, list[str]] = {}

    def compile_(number: int) -> None:
        with compiling() as warnings:
            write(SAYS.format(number))
        kept[number] = warnings

    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    open_before = files()
    threads = [threading.Thread(target=compile_, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept == {number: [SAYS.format(number).strip()] for number in range(8)}
    deadline = time.monotonic() + 10
    while files() > open_before and time.monotonic() < deadline:
        time.sleep(0.01)  # the listeners close theirs in their own time
    assert files() <= open_before


def test_a_process_that_was_started_meanwhile_is_not_waited_for(capfd):
    with compiling():
        child = subprocess.Popen(["sh", "-c", "read line; echo from the child >&2"], stdin=subprocess.PIPE)
    child.communicate(b"go\n")
    deadline = time.monotonic() + 10
    said = ""
    while "child" not in said and time.monotonic() < deadline:
        said += capfd.readouterr().err
    assert said == "from the child\n"


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


def test_what_was_said_comes_out_though_the_process_dies():
    done = subprocess.run([sys.executable, "-c", DIES], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "last words\n")


def test_without_a_standard_error_there_is_nothing_to_hear():
    done = subprocess.run([sys.executable, "-c", CLOSED], capture_output=True, text=True)
    assert done.stdout == "[]\n"
