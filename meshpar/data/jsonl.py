"""JSON Lines: each line of a file is a document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from meshpar.data.corpus import AtPath, TextCorpus
from meshpar.data.encode import Content
from meshpar.data.file_ranges import FileRange
from meshpar.data.reading import read_each
from meshpar.errors import nearest
from meshpar.regular_files import open_regular

LONGEST_LINE = 2**28
_BLOCK = 2**20


class Jsonl(AtPath, TextCorpus):
    """Files with a JSON object per line, of which a field is the document: text, or a list of token ids.

    >>> Jsonl(path="corpus", field="body").glob
    '**/*.jsonl'
    """

    kind: Literal["jsonl"] = "jsonl"
    glob: str = "**/*.jsonl"
    field: str = "text"
    """The field of each object that contains the document."""

    def units(self, path: Path) -> int:
        return path.stat().st_size

    def read(self, part: FileRange) -> Iterator[Content]:
        for where, _, content in read_each(lines(part), partial(_content, field=self.field)):
            yield Content(where, content)


class Line(NamedTuple):
    """A line of a file. Its text, `file:number`, counts the lines before `start` when an error needs it.

    Args:
      number: from 1, of the lines that begin at or after the byte `start`.
    """

    path: Path
    start: int
    number: int

    def __str__(self) -> str:
        before = 0
        if self.start:
            with open_regular(self.path) as file:
                for at in range(0, self.start, _BLOCK):
                    before += file.read(min(_BLOCK, self.start - at)).count(b"\n")
                before += not _is_at_line(file, self.start)
        return f"{self.path}:{before + self.number}"


def lines(part: FileRange) -> Iterator[tuple[Line, bytes]]:
    """Each line of a range that is not blank. A file is not read beyond a line that is too long."""
    for path in part.files:
        with open_regular(path) as file:
            at = _first_line(file, part.start)
            number = 0
            while (part.stop is None or at < part.stop) and (line := file.readline(LONGEST_LINE + 1)):
                number += 1
                at += len(line)
                if line.strip():
                    yield Line(path, part.start, number), line
                if len(line) > LONGEST_LINE:
                    break


def _first_line(file: BufferedReader, start: int) -> int:
    """Goes to the first line that begins at or after a byte, and says where it is."""
    if not _is_at_line(file, start):
        while (part := file.readline(_BLOCK)) and not part.endswith(b"\n"):
            pass
    return file.tell()


def _is_at_line(file: BufferedReader, start: int) -> bool:
    """Goes to a byte, and says whether a line begins there."""
    file.seek(max(0, start - 1))
    return start == 0 or file.read(1) == b"\n"


def _content(line: bytes, field: str) -> str | np.ndarray:
    """Raises ValueError(what is wrong), or ValueError(what is wrong, fix)."""
    value = parse(line)
    if not isinstance(value, dict):
        raise ValueError(f"is {_kind(value)}, not a JSON object", f'write {{"{field}": ...}}')
    if field not in value:
        near = nearest(field, value)
        raise ValueError(f"has no field {field!r}", f"data.field={near}?" if near else f"it has {sorted(value)}")
    content = value[field]
    if isinstance(content, list) and all(type(i) is int and 0 <= i < 2**32 for i in content):
        return np.array(content, np.uint32)
    if not isinstance(content, str):
        raise ValueError(f"its field {field!r} is {_kind(content)}, neither text nor a list of token ids")
    return content


def parse(line: bytes) -> Any:
    """The JSON of a line. Raises ValueError(what is wrong), or ValueError(what is wrong, fix)."""
    if len(line) > LONGEST_LINE:
        raise ValueError(f"is longer than {LONGEST_LINE} bytes", "split the document into several")
    try:
        return json.loads(line.strip())
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ValueError("is not readable JSON: it is nested too deeply") from None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
