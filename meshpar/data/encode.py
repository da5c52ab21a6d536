"""Encodes the contents of documents as token ids."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from meshpar.data.documents import HEADING, share, share_of_ids
from meshpar.data.tokenizer import Tokenizer, TokenizerFile
from meshpar.errors import DataError, Problems

_TOGETHER = 256  # documents passed to a tokenizer at once, which encodes them in parallel


@dataclass(frozen=True)
class Content:
    """The content of one document.

    Args:
      where: its text is the file, or the line of a file, for errors.
      content: text, or token ids integers[length].
      name: determines the side of the split; None to use the content, which puts copies on the same side.
    """

    where: object
    content: str | np.ndarray
    name: str | None = None


def encode(documents: Iterable[Content], tokenizer: Tokenizer) -> Iterator[tuple[float, np.ndarray]]:
    """(share, tokens) of each document that is not empty. The tokenizer's `eos`, if it has one, is appended to texts.

    Raises:
      DataError: lists documents that cannot be encoded, or whose ids are outside of the vocabulary.
    """
    documents = iter(documents)
    problems = Problems()
    special = _Special(tokenizer.vocab_size, tokenizer.bos, tokenizer.eos)
    while group := list(islice(documents, _TOGETHER)):
        for document, ids in zip(group, _tokens(group, tokenizer, special, problems), strict=True):
            if ids.size:
                yield _share(document, ids), ids
    problems.raise_any(DataError, HEADING)


class _Special(NamedTuple):
    """Of a tokenizer, read once: a tokenizer file looks for the files beside it each time."""

    vocab_size: int
    bos: int
    eos: int | None


def _tokens(group: list[Content], tokenizer: Tokenizer, special: _Special, problems: Problems) -> list[np.ndarray]:
    texts = [document.content for document in group if isinstance(document.content, str)]
    if isinstance(tokenizer, TokenizerFile) and len(texts) == len(group):
        with suppress(DataError):  # the error does not name the document, so each is then encoded alone
            return [_closed(ids, special.eos) for ids in tokenizer.encode_all(texts)]
    return [_alone(document, tokenizer, special, problems) for document in group]


def _alone(document: Content, tokenizer: Tokenizer, special: _Special, problems: Problems) -> np.ndarray:
    try:
        if isinstance(document.content, str):
            return _closed(tokenizer.encode(document.content), special.eos)
        check_ids(document.content, special.vocab_size)
        is_opened = document.content[:1].tolist() == [special.bos]
        return document.content[int(is_opened) :]  # `Documents` inserts the opening token
    except DataError as error:
        problems.add(str(document.where), str(error))
        return np.zeros(0, np.int32)


def _share(document: Content, ids: np.ndarray) -> float:
    if document.name is not None:
        return share(os.fsencode(document.name))
    if isinstance(document.content, str):
        return share(document.content.encode("utf-8", "surrogatepass"))
    return share_of_ids(ids)


def _closed(ids: np.ndarray, eos: int | None) -> np.ndarray:
    return ids if eos is None or not ids.size else np.append(ids, np.array(eos, ids.dtype))


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Raises DataError unless the array holds integers of the vocabulary."""
    if ids.dtype.kind not in "iu":
        raise DataError(f"is {ids.dtype}, not token ids, which are integers")
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        beyond = ids.max() if ids.max() >= vocab_size else ids.min()
        raise DataError(f"has the token id {beyond}, outside of the vocabulary of {vocab_size}")
