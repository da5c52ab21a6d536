"""Runs command lines in this process, one after the other: JSON lines in, JSON lines out; see `harness`."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from meshpar import cli

MEMORY = 12 * 2**30
"""Limit of the address space in bytes, of which JAX reserves a part that it does not use."""


def crash(*_: Any) -> None:
    raise KeyError("planted")


def hang(*_: Any) -> None:
    while True:
        time.sleep(0.01)


def devour(*_: Any) -> None:
    bytearray(MEMORY)


PLANTS = {"crash": crash, "hang": hang, "devour": devour}


def build(folder: Path, files: dict[str, str]) -> None:
    """Writes the files of a case: `name` or `link:name`, `fifo:name`, `dir:name`; the contents are base64."""
    for name, content in files.items():
        kind, colon, rest = name.partition(":")
        path = folder / (rest if colon else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = base64.b64decode(content)
        if not colon:
            path.write_bytes(data)
        elif kind == "link":
            path.symlink_to(data.decode())
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.mkdir()


def result(case: dict[str, Any]) -> dict[str, Any]:
    """The exit code of a case and what it printed; a traceback instead of a code, where one escaped."""
    out = io.StringIO()
    err = io.StringIO()
    code: Any = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        build(Path(folder), case["files"])
        sys.argv = ["meshpar", *case["words"]]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                cli.main()
            except SystemExit as ended:
                code = ended.code or 0
            except BaseException:
                code = traceback.format_exc()
    return {"code": code, "out": out.getvalue()[-2000:], "err": err.getvalue()[-4000:]}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    cases = os.fdopen(os.dup(0))
    replies = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)  # a case may read /dev/stdin
    os.dup2(nothing, 1)  # ... and what a library prints is no reply
    from meshpar.experiment import actions, config  # noqa: F401 (imported before the first case is timed)

    replies.write("ready\n")
    replies.flush()
    for line in cases:
        case = json.loads(line)
        if case.get("plant"):
            config.load = PLANTS[case["plant"]]
        replies.write(json.dumps(result(case)) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
