"""Reads files whose lines a chat template renders: conversations, pairs of answers, prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from meshpar.data.chat.targets import UnsuitableTemplateError
from meshpar.data.file_ranges import FileRange
from meshpar.data.jsonl import MOST_PROBLEMS, lines, parse
from meshpar.errors import ConfigError, Problems

T = TypeVar("T")


def encoded_lines(files: list[Path], encode: Callable[[Any], T], problems: Problems) -> Iterator[tuple[str, bytes, T]]:
    """Each line that `encode` accepts: its place, its text, and what `encode` makes of its JSON.

    Args:
      problems: receives the lines that are refused, and what the caller finds in others; it ends at `MOST_PROBLEMS`, or
        at a template that suits no line.
    """
    for place, line in lines(FileRange(tuple(files))):
        where = str(place)
        try:
            encoded = encode(parse(line))
        except UnsuitableTemplateError as error:  # it is so for each line
            problems.add(where, *error.args)
            return
        except ConfigError as error:
            problems.add(where, str(error))
        except ValueError as error:
            problems.add(where, *error.args)
        else:
            yield where, line, encoded
        if len(problems) == MOST_PROBLEMS:
            return
