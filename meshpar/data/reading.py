"""Reads documents or files one by one, and reports those that are wrong together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from meshpar.data.documents import HEADING
from meshpar.errors import DataError, Problems

MOST_PROBLEMS = 10  # reading stops here
Stored = TypeVar("Stored")
T = TypeVar("T")


class SameForAllError(ValueError):
    """What is wrong with a document, and with all others as well: (what is wrong), or (what is wrong, the fix)."""


def read_each(
    documents: Iterable[tuple[object, Stored]], parse: Callable[[Stored], T]
) -> Iterator[tuple[object, Stored, T]]:  # fmt: skip
    """The place of each document, the document as it is stored, and what `parse` makes of it.

    After the first document that is wrong, others are read only to find further problems.

    Args:
      documents: (place, document as it is stored) of each; the text of its place is for errors.
      parse: raises ValueError(what is wrong), or ValueError(what is wrong, the fix).

    Raises:
      DataError: lists the documents that are wrong.
    """
    problems = Problems()
    for where, stored in documents:
        try:
            document = parse(stored)
        except ValueError as error:
            problems.add(str(where), *map(str, error.args))
            if isinstance(error, SameForAllError) or len(problems) == MOST_PROBLEMS:
                break
            continue
        if not problems:
            yield where, stored, document
    problems.raise_any(DataError, HEADING)
