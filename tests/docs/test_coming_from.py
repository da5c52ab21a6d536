"""The keys of `docs/coming-from.md` are keys of a config, with values that it accepts."""

from __future__ import annotations

import re

import pytest

from meshpar.errors import ConfigError
from meshpar.experiment.config import load
from tests.docs.page import ROOT, check_command

PAGE = ROOT / "docs" / "coming-from.md"
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
OVERRIDE = re.compile(r"[\w.]+=(?:\{[^}]*\}|\[[^]]*\]|\S+)")


def cells(text: str) -> list[str]:
    """The code in the second column of each table."""
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("|")]
    return [code for cell in rows for code in re.findall(r"`([^`]+)`", cell)]


def check(code: str) -> None:
    if code.startswith("meshpar "):
        check_command(code.replace("CONFIG", "configs/quickstart.yaml"))
    elif "=" in code:
        overrides = OVERRIDE.findall(code)
        assert " ".join(overrides) == code
        load(QUICKSTART, overrides)


def test_each_key_is_a_key_of_a_config():
    found = cells(PAGE.read_text())
    assert len(found) > 50
    for code in found:
        check(code)


@pytest.mark.parametrize("code", ["mesh.fsd=4", "rules=[zero4]", "parallel.context=rings", "model.remat={sav: [q]}"])
def test_control_a_wrong_key_is_seen(code):
    row = f"| `x` | `{code}` | |"
    assert cells(row) == [code]
    with pytest.raises(ConfigError):
        check(code)
