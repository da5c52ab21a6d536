"""A config file or an override holds bounded plain data; anything else is refused at once, with a message."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from meshpar.config import Config, load
from meshpar.errors import ConfigError


class Free(Config):
    """Accepts any value, so that only the reader can refuse one."""

    anything: Any = None
    size: int = 1
    ratio: float = 1.0


def bomb(levels: int) -> str:
    """YAML of a few lines that stands for 10**levels values."""
    lines = ["a0: &a0 x", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels + 1))]
    return "{" + ", ".join(lines) + "}"


DIGITS = "9" * 5000
REFUSED = {
    "aliases that explode": (bomb(9), "holds more than 20000 values"),
    "an alias within itself": ("&a [*a]", "an alias refers to the value that contains it"),
    "an alias within itself, by a key": ("&a {b: {c: *a}}", "an alias refers to the value that contains it"),
    "brackets 5000 deep": ("[" * 5000 + "]" * 5000, "nested more than 32 levels deep"),
    "braces 500 deep": ("{a: " * 500 + "1" + "}" * 500, "nested more than 32 levels deep"),
    "a set": ("!!set {a}", "the tag tag:yaml.org,2002:set is refused: a config holds only plain data"),
    "binary": ("!!binary aGk=", "is refused: a config holds only plain data"),
    "an object": ("!!python/object/apply:os.system [ls]", "is refused: a config holds only plain data"),
    "5000 digits": (DIGITS, "(5000 characters) is not a number"),
    "5000 binary digits": ("0b" + "1" * 5000, "(5002 characters) is beyond 64 bits"),
    "an integer beyond 64 bits": (str(2**64), "18446744073709551616 is beyond 64 bits"),
    "no hexadecimal digit": ("0x_", "0x_ is not a number"),
    "a list as a key": ("{[a]: 1}", "a list or a mapping is used as a key"),
    "a long key": (f"{{{'k' * 500}: 1}}", "a key has 500 characters, more than 200"),
    "a merge": ("{<<: {a: 1}}", "<< is not supported; use extends"),
    "a NUL": ('"\\0"', r"a string holds the character '\x00'"),
    "a surrogate": ('"\\ud800"', r"a string holds the character '\ud800'"),
    "no character": ('"\\UFFFFFFFF"', "is not YAML"),
    "no version": (f"%YAML 1.{DIGITS}\n--- a", "is not YAML"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_anything_but_bounded_plain_data_is_refused_in_files_and_overrides(case, tmp_path):
    text, message = REFUSED[case]
    path = tmp_path / "config.yaml"
    path.write_text(text if text.startswith("%") else f"anything: {text}\n")
    started = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        load(Free, path)
    assert message in str(refused.value)
    path.write_text("size: 2\n")
    with pytest.raises(ConfigError) as refused:
        load(Free, path, [f"anything={text}"])
    assert message in str(refused.value)
    assert len(str(refused.value)) < 1000
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "text", [bomb(3), "[" * 30 + "]" * 30, str(2**64 - 1), "&a [1, 2]", "{a: &b 1, c: *b}", "'!!set'"]
)
def test_control_bounded_plain_data_is_read(text, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(f"anything: {text}\n")
    assert load(Free, path).anything == load(Free, path, [f"anything={text}"]).anything is not None


def test_keys_are_read_as_text(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("anything: {on: 1, 0x10: 2, null: 3, 1e3: 4}\n")
    assert load(Free, path).anything == {"on": 1, "0x10": 2, "null": 3, "1e3": 4}


def fifo(path: Path) -> str:
    os.mkfifo(path)
    return "it is a pipe, not a regular file"


def folder(path: Path) -> str:
    path.mkdir()
    return "it is a folder, not a regular file"


def dangling(path: Path) -> str:
    path.symlink_to("nowhere.yaml")
    return "it is a link to nowhere.yaml, which does not exist"


def device(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "it is a device, not a regular file"


def huge(path: Path) -> str:
    path.write_text("size: 1 #" + "x" * 2**20)
    return "it has more than 256 KiB"


def loop(path: Path) -> str:
    path.symlink_to(path.name)
    return "it is a link to"


@pytest.mark.parametrize("make", [fifo, folder, dangling, device, huge, loop])
def test_a_path_that_is_no_regular_text_file_is_refused_at_once(make, tmp_path):
    path = tmp_path / "config.yaml"
    why = make(path)
    with pytest.raises(ConfigError) as refused:
        load(Free, path)
    assert f"{path} cannot be read: {why}" in str(refused.value)
    above = tmp_path / "above.yaml"
    above.write_text("extends: config.yaml\n")
    with pytest.raises(ConfigError):
        load(Free, above)


def test_a_path_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="File name too long"):
        load(Free, tmp_path / ("x" * 300))
    (tmp_path / "config.yaml").write_text(f"extends: {'x' * 300}\n")
    with pytest.raises(ConfigError, match="File name too long"):
        load(Free, tmp_path / "config.yaml")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "config.yaml").write_bytes(b"size: \xff\n")
    with pytest.raises(ConfigError, match="is not UTF-8: 'utf-8' codec"):
        load(Free, tmp_path / "config.yaml")


def test_long_values_and_long_lists_of_problems_are_shortened(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("".join(f"k{i}: 1\n" for i in range(5000)) + f"size: {'x' * 5000}\n")
    with pytest.raises(ConfigError) as refused:
        load(Free, path)
    message = str(refused.value)
    assert message.startswith("5001 problems in ")
    assert message.endswith("  ... and 4901 more")
    assert len(message) < 20_000


def test_a_number_that_is_not_finite_is_reported_once(tmp_path):
    (tmp_path / "config.yaml").write_text("ratio: .inf\n")
    with pytest.raises(ConfigError) as refused:
        load(Free, tmp_path / "config.yaml")
    assert str(refused.value).splitlines()[1:] == [
        f"  ratio ({tmp_path / 'config.yaml'}:1)",
        "    must be finite, got inf",
    ]
