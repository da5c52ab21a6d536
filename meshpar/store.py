"""Copies data files of object stores to a local folder before they are read: `s3://`, `gs://`, `hf://`, `file://`.

A copy is compared with the store's names, sizes and versions at each start, so that only files that changed are copied.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from meshpar.errors import DataError, control_character
from meshpar.progress import say
from meshpar.regular_files import STORES, stored

TRIES = 4
FIRST_WAIT_S = 0.5
"""Before the second try; each further wait is twice as long."""

T = TypeVar("T")


def local(path: Path | str) -> Path:
    """The path itself, or where the files of an address are after they were copied, once in a process.

    Raises:
      DataError: the store cannot be read, after `TRIES` tries; or it has no such files, or other sizes than it says.
    """
    if not stored(str(path)):
        return Path(path)
    scheme, rest = _parts(str(path))  # a Path has one slash after the scheme
    return _copied(f"{scheme}:{'///' if scheme == 'file' else '//'}{rest}")


def folder() -> Path:
    """Where copies are: `MESHPAR_CACHE`, or `~/.cache/meshpar`."""
    return Path(os.environ.get("MESHPAR_CACHE") or Path.home() / ".cache" / "meshpar")


@lru_cache
def _copied(address: str) -> Path:
    from filelock import FileLock

    scheme, rest = _parts(address)
    system, root = opened(address)
    listed = tried(f"{address} cannot be listed", lambda: files(system, root, address))
    if not listed:
        raise DataError(f"{address} has no files: there is no such folder or file, or it may not be listed")
    where = folder() / scheme / rest
    beside = folder() / "listed" / scheme / f"{rest}.listed"
    beside.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(beside.with_suffix(".lock")):
        about = beside.with_suffix(".json")
        if listed.keys() == {""}:
            _update(system, {where.name: root}, where.parent, {where.name: listed[""]}, address, about)
        else:
            _update(system, {name: f"{root}/{name}" for name in listed}, where, listed, address, about)
            _remove_others(where, listed)
    return where


def _parts(address: str) -> tuple[str, str]:
    """Scheme and path."""
    scheme, _, rest = address.partition(":")
    return scheme, rest.strip("/")


def opened(address: str, key: str = "data.path") -> tuple[Any, str]:
    """The file system, and the path in it. Keys and passwords come from the environment of its library.

    Raises:
      DataError: its library is not installed; or the address holds a password, or leads out of its folder.
    """
    scheme, rest = _parts(address)
    if "@" in rest.partition("/")[0] or "?" in rest:
        raise DataError(f"{key}: {scheme}://... holds a password or a query; set them in the environment instead")
    if ".." in PurePosixPath(rest).parts:
        raise DataError(f"{address} leads out of its folder: leave out ..")
    import fsspec

    try:
        return fsspec.core.url_to_fs(f"{scheme}://{'/' if scheme == 'file' else ''}{rest}")
    except ImportError:
        extra = f"pip install {STORES[scheme]}"
        raise DataError(f"{address} needs {STORES[scheme]}, which is not installed: {extra}") from None


def files(system: Any, root: str, address: str) -> dict[str, list[Any]]:
    """Name below the root -> its size and version; the name of a single file is empty."""
    system.invalidate_cache()
    found = system.find(root, detail=True)
    listed = {}
    for path, info in found.items():
        name = "" if path == root else path.removeprefix(root).lstrip("/")
        if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute() or control_character(name):
            raise DataError(f"{address} has a file {name!r}, whose name leads out of the folder")
        if not name.endswith("/"):
            version = info.get("ETag") or info.get("etag") or info.get("blob_id") or info.get("mtime")
            listed[name] = [int(info["size"]), str(version or info.get("LastModified") or "")]
    return listed


def _update(
    system: Any, paths: dict[str, str], where: Path, listed: dict[str, list[Any]], address: str, about: Path
) -> None:
    """Copies the files that differ from the store's, and keeps what was copied in the file `about`."""
    where.mkdir(parents=True, exist_ok=True)
    before = _read(about)
    wanted = [name for name, now in listed.items() if before.get(name) != now or not _has(where / name, now)]
    if wanted:
        say(f"meshpar: copies {len(wanted)} files of {address} to {where}")
    try:
        for name in wanted:
            (where / name).parent.mkdir(parents=True, exist_ok=True)
            get = partial(copy, system, paths[name], where / name, listed[name][0])
            tried(f"{address}: {name} cannot be copied", get)
            before[name] = listed[name]
    finally:  # a copy that is stopped goes on
        about.write_text(json.dumps(before))


def _remove_others(where: Path, listed: Mapping[str, Any]) -> None:
    """Removes the files of a copy that the store does not have."""
    for below, _, names in os.walk(where):
        for path in (Path(below, name) for name in names):
            if path.relative_to(where).as_posix() not in listed:
                path.unlink(missing_ok=True)


def copy(system: Any, source: str, target: Path, size: int) -> None:
    partial = target.with_name(f"{target.name}.partial")
    system.get_file(source, str(partial))
    found = partial.stat().st_size
    if found != size:
        partial.unlink()
        raise OSError(f"the store says {size} bytes, and sent {found}")
    partial.replace(target)


def _read(about: Path) -> dict[str, list[Any]]:
    """What was copied; nothing if that is not known."""
    try:
        found = json.loads(about.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _has(path: Path, version: list[Any]) -> bool:
    return path.is_file() and path.stat().st_size == version[0]


def tried(what: str, do: Callable[[], T]) -> T:
    """Tries several times: stores fail now and then."""
    for attempt in range(TRIES):
        try:
            return do()
        except DataError:
            raise
        except (FileNotFoundError, PermissionError) as error:
            raise DataError(f"{what}: {_said(error)}") from None
        except Exception as error:
            if attempt == TRIES - 1:
                raise DataError(f"{what}, after {TRIES} tries: {_said(error)}") from None
            time.sleep(FIRST_WAIT_S * 2**attempt)
    raise AssertionError


def _said(error: Exception) -> str:
    """The error in one line, without the signature or key that an address in it may have."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    return re.sub(r"\?\S+|(?i:(key|token|secret|signature|credential)\S*\s*[=:]\s*)\S+", "...", text)[:300]
