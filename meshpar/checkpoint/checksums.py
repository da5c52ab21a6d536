"""Checksums and sizes of a checkpoint's files: Orbax itself does not notice a flipped bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import pydantic

from meshpar.errors import Problems

FILE = "sha256.json"
THREADS = 4  # hashing releases the GIL


class File(pydantic.BaseModel):
    """SHA-256 and size of a file as it was written; checkpoints of format 1 have no size."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    sha256: str
    bytes: Annotated[int, pydantic.Field(ge=0)] | None = None


class Listing(pydantic.BaseModel):
    """The content of `FILE`, with a checksum of `files` itself."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    files: dict[str, File]
    sha256: str


_FIRST_FORMAT = pydantic.TypeAdapter(dict[str, str])


def write(folder: Path) -> None:
    """Writes the SHA-256 and the size of every file below `folder` into `FILE`, by path."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(THREADS) as threads:
        digests = threads.map(sha256, (folder / name for name in names))
        files = {
            name: File(sha256=digest, bytes=(folder / name).stat().st_size)
            for name, digest in zip(names, digests, strict=True)
        }
    listing = Listing(files=files, sha256=_own(files))
    (folder / FILE).write_text(listing.model_dump_json(indent=2))


def read(folder: Path) -> dict[str, File]:
    """Path -> checksum and size of each file as it was written.

    Raises:
      OSError, ValueError: `FILE` is missing, does not match its checksum, or names a file outside of the folder.
    """
    text = (folder / FILE).read_bytes()
    try:
        listing = Listing.model_validate_json(text)
        files = listing.files
        if listing.sha256 != _own(files):
            raise ValueError("does not match its checksum")
    except pydantic.ValidationError:
        files = {name: File(sha256=digest) for name, digest in _FIRST_FORMAT.validate_json(text, strict=True).items()}
    if not all((folder / name).resolve().is_relative_to(folder.resolve()) for name in files):
        raise ValueError("names a file outside of the checkpoint")
    return files


def compare(folder: Path, files: Mapping[str, File], names: Iterable[str]) -> Problems:
    """Reads files and compares their checksums; each one that was changed is a problem."""
    problems = Problems()
    names = list(names)
    with ThreadPoolExecutor(THREADS) as threads:
        for name, what in zip(names, threads.map(lambda name: _problem(folder, files, name), names), strict=True):
            if what:
                problems.add(str(folder / name), what)
    return problems


def compare_sizes(folder: Path, files: Mapping[str, File]) -> Problems:
    """Compares sizes without reading the files; each one that is missing or has another size is a problem."""
    problems = Problems()
    for name, file in files.items():
        path = folder / name
        if not path.is_file():
            problems.add(str(path), "is missing")
        elif file.bytes not in (None, path.stat().st_size):
            problems.add(str(path), f"has {path.stat().st_size} bytes instead of {file.bytes}")
    return problems


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _problem(folder: Path, files: Mapping[str, File], name: str) -> str:
    if name not in files:
        return f"is not listed in {FILE}"
    try:
        return "" if sha256(folder / name) == files[name].sha256 else "does not match its checksum"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _own(files: Mapping[str, File]) -> str:
    plain = {name: [file.sha256, file.bytes] for name, file in files.items()}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
