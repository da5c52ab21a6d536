"""JSON Lines: each line of a file is a document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meshpar.errors import DataError, Problems, nearest
from meshpar.regular import open_regular
from meshpar.train.data.corpus import AtPath, TextCorpus
from meshpar.train.data.documents import HEADING
from meshpar.train.data.encode import Content

MOST_PROBLEMS = 10  # reading stops here
LONGEST_LINE = 2**28


class Jsonl(AtPath, TextCorpus):
    """Files with one JSON object per line. A field of the object is the document: text, or a list of token ids.

    >>> Jsonl(path="corpus", field="body").glob
    '**/*.jsonl'
    """

    kind: Literal["jsonl"] = "jsonl"
    glob: str = "**/*.jsonl"
    field: str = "text"
    """The field of each object that contains the document."""

    def read(self, files: list[Path]) -> Iterator[Content]:
        problems = Problems()
        for where, line in lines(files):
            try:
                content = _content(line, self.field)
            except ValueError as error:
                problems.add(where, *error.args)
                if len(problems) == MOST_PROBLEMS:
                    break
                continue
            if not problems:  # after the first problem, lines are read only to find further ones
                yield Content(where, content)
        problems.raise_any(DataError, HEADING)


def lines(files: list[Path]) -> Iterator[tuple[str, bytes]]:
    """(file:number, line) of each line that is not blank. A file is not read beyond a line that is too long."""
    for path in files:
        with open_regular(path) as file:
            number = 0
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if line.strip():
                    yield f"{path}:{number}", line
                if len(line) > LONGEST_LINE:
                    break


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
