"""What a user types, in this process, and what comes back."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from meshpar import cli


class Said(NamedTuple):
    code: int
    out: str
    err: str


def exit_code(*words: object) -> int:
    """Of `meshpar WORDS`; what it prints is printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["meshpar", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0)
