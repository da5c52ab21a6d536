"""A process that has imported meshpar, and forks for each page of the docs and for each `meshpar` command on it.

Importing JAX, Flax and meshpar takes two CPU seconds, and the pages would do it a hundred times. No backend is started
before the fork, and JAX's variables are those of the pages. A command `page` or `meshpar` in `bin` sends its arguments,
its folder, its environment and its files to the server, waits for the fork, and ends with its code.

`page.py` starts it by `python -c`, since Python's prompt has no file either.
"""

from __future__ import annotations

import codeop
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

END = "=== end of block ==="
COMMAND = """#!{python} -ISE
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    request = json.dumps([sys.argv, os.getcwd(), dict(os.environ)])
    socket.send_fds(server, [request.encode()], [0, 1, 2])
    fork = int(server.recv(100))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os.kill(fork, number))
    code = int(server.recv(100))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
"""Python without site-packages starts in 0.02 s."""


def pasted(code: str, page: str, line: int) -> Iterator[CodeType]:
    """The programs that Python's prompt makes of the lines of a block and the enter key."""
    compiler, begin, lines = codeop.CommandCompiler(), line, []
    for number, text in enumerate([*code.splitlines(), ""], line + 1):
        lines.append(text)
        if (program := compiler("\n" * begin + "\n".join(lines), page, "single")) is not None:
            yield program
            begin, lines = number, []
    if any(lines):
        raise SyntaxError(f"{page}:{line}: the block is not complete")


def run_page(page: str) -> None:
    """Runs the blocks of a page, (language, line, code, lines to wait for) in JSON from the standard input."""
    sys.displayhook = lambda value: None  # the pages do not show the value of each line
    names, shell = {"__name__": "__main__"}, dict(os.environ)
    background: list[subprocess.Popen[str]] = []
    try:
        for language, line, code, num_lines in json.load(sys.stdin):
            if language == "python":
                for program in pasted(code, page, line):
                    exec(program, names)  # noqa: S102
            elif num_lines is None:
                subprocess.run(["bash", "-c", code], stderr=subprocess.STDOUT, env=shell)
            else:
                background.append(begun(code, num_lines, shell))
            print(END, flush=True)
    finally:
        for process in background:
            process.terminate()
        ends = [process.wait() for process in background]
    assert not any(ends), f"in the background: ended with {ends}"


def begun(code: str, num_lines: int, env: dict[str, str]) -> subprocess.Popen[str]:
    """A command that has printed so many lines, and runs on."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(shlex.split(code), env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    assert process.stdout
    lines = [process.stdout.readline() for _ in range(num_lines)]
    print(*lines, sep="", end="")
    if "" in lines:  # it closed its output, so it is about to end
        process.wait(60)
    return process


def run_meshpar(*words: str) -> None:
    from meshpar.cli import main

    sys.argv = ["meshpar", *words]
    main()


def serve(address: str) -> None:
    """Returns in each fork, in place of the command that asked for it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        print("listening", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for a fork
        while True:
            asked, _ = listener.accept()
            if not os.fork():
                break
            asked.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with asked:
        request, files, *_ = socket.recv_fds(asked, 2**20, 3)
        if fork := os.fork():
            asked.send(str(fork).encode())
            asked.send(str(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])).encode())
            os._exit(0)
    for stream, file in enumerate(files):
        os.dup2(file, stream)
        os.close(file)
    (name, *words), folder, env = json.loads(request)
    variables = [{key: value for key, value in one.items() if key.startswith("JAX_")} for one in (env, os.environ)]
    assert variables[0] == variables[1], "JAX has read its variables already"
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    {"page": run_page, "meshpar": run_meshpar}[Path(name).name](*words)


if __name__ == "__main__":
    import gc

    import flax.nnx  # noqa: F401
    import optax  # noqa: F401

    import meshpar

    for public in meshpar.__all__:
        getattr(meshpar, public)  # imports what is imported at the first use
    gc.set_threshold(100_000, 20, 20)  # as in the other tests
    serve(sys.argv[1])
