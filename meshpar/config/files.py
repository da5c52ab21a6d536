"""Reads config files and the files that they extend."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from meshpar.config.merging import merge
from meshpar.config.model import Config
from meshpar.config.yaml_text import UnreadableYaml, read
from meshpar.errors import ConfigError, Problems
from meshpar.regular_files import nearby, open_regular

MAX_BYTES = 256 * 1024


def read_file(
    root: type[Config], path: Path, sources: dict[str, str], problems: Problems, seen: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The mapping of a file, merged over the files that it extends.

    Args:
      sources: receives `file:line` of each dotted path.
      seen: the real paths of the files that extend this one.
    """
    real = os.path.realpath(path)
    if real in seen:
        problems.add(str(path), "extends itself through other files", "remove one extends")
        return {}
    own: dict[str, str] = {}
    data = _parse(path, own, problems)
    parent = data.pop("extends", None)
    inherited: dict[str, Any] = {}
    if parent is not None:
        is_inside = isinstance(parent, str) and not Path(parent).is_absolute() and ".." not in Path(parent).parts
        if is_inside:
            inherited = read_file(root, path.parent / parent, sources, problems, (*seen, real))
        else:
            what = f"{parent!r} is not a path inside this file's folder"
            problems.add(f"extends ({own['extends']})", what, "write a path relative to this folder, without '..'")
    sources.update(own)
    return merge(root, inherited, data, "", sources, problems)


def _parse(path: Path, sources: dict[str, str], problems: Problems) -> dict[str, Any]:
    try:
        value = read(read_text(path), "", lambda line: f"{path}:{line}", sources, problems)
    except UnreadableYaml as error:
        raise ConfigError(f"{path}{error.place} {error}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        what = "a list" if isinstance(value, list) else f"the {type(value).__name__} {value!r}"
        raise ConfigError(f"{path} holds {what}, not a mapping of keys")
    return value


def read_text(path: Path) -> str:
    """The text of a regular file of at most 256 KiB. A pipe or a device is an error, and is never waited for.

    Raises:
      ConfigError: the file cannot be read, is too large, or is not UTF-8.
    """
    try:
        if path.is_symlink() and not path.exists():
            raise ConfigError(f"{path} cannot be read: it is a link to {path.readlink()}, which does not exist")
        with open_regular(path) as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path} cannot be read: it has more than {MAX_BYTES // 1024} KiB")
        return content.decode("utf-8")
    except FileNotFoundError as error:
        where = f"\n  {fix}" if (fix := nearby(path)) else ""
        raise ConfigError(f"{path} cannot be read: {error.strerror}{where}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from None
