"""Config files: their text, and what they extend."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from meshpar.config.merging import merge
from meshpar.config.model import Config
from meshpar.config.yaml_text import NotRead, read
from meshpar.errors import ConfigError, Problems

MAX_BYTES = 256 * 1024


def read_file(
    root: type[Config], path: Path, sources: dict[str, str], problems: Problems, seen: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The mapping of a file, merged over those that it extends; `sources` gets file and line of each key."""
    real = os.path.realpath(path)
    if real in seen:
        problems.add(str(path), "extends itself, by way of others", "remove one extends")
        return {}
    own: dict[str, str] = {}
    data = _parse(path, own, problems)
    parent = data.pop("extends", None)
    inherited: dict[str, Any] = {}
    if parent is not None:
        within = isinstance(parent, str) and not Path(parent).is_absolute() and ".." not in Path(parent).parts
        if within:
            inherited = read_file(root, path.parent / parent, sources, problems, (*seen, real))
        else:
            what = f"{parent!r} is not a path within this folder"
            problems.add(f"extends ({own['extends']})", what, "a relative path")
    sources.update(own)
    return merge(root, inherited, data, "", sources, problems)


def _parse(path: Path, sources: dict[str, str], problems: Problems) -> dict[str, Any]:
    try:
        value = read(read_text(path), "", lambda line: f"{path}:{line}", sources, problems)
    except NotRead as error:
        raise ConfigError(f"{path}{error.place} {error}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        what = "a list" if isinstance(value, list) else f"the {type(value).__name__} {value!r}"
        raise ConfigError(f"{path} holds {what}, not a mapping of keys")
    return value


def read_text(path: Path) -> str:
    """The text of a small regular file; of a pipe or a device it is not waited for.

    Raises:
      ConfigError: it cannot be read, is too large, or holds no text.
    """
    try:
        return _text(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from None


def _text(path: Path) -> str:
    if path.is_symlink() and not path.exists():
        raise ConfigError(f"{path} cannot be read: it is a link to {path.readlink()}, which does not exist")
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            what = "Is a directory" if stat.S_ISDIR(mode) else "it is not a regular file"
            raise ConfigError(f"{path} cannot be read: {what}")
        found = file.read(MAX_BYTES + 1)
    if len(found) > MAX_BYTES:
        raise ConfigError(f"{path} cannot be read: it has more than {MAX_BYTES // 1024} KiB")
    return found.decode("utf-8")
