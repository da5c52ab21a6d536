"""What documents hold, on its way to tokens."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import numpy as np

from meshpar.errors import DataError, Problems
from meshpar.train.data.documents import HEADING, share, share_of_ids
from meshpar.train.data.tokenizer import Tokenizer, TokenizerFile

_TOGETHER = 256  # documents that a tokenizer gets at once, to encode them in parallel


@dataclass(frozen=True)
class Content:
    """What one document holds.

    Args:
      where: as people find it: a file, or a line of one.
      content: text, or integers[length] that are token ids already.
      name: decides on the side of the split; None for the content itself, which puts copies on one side.
    """

    where: str
    content: str | np.ndarray
    name: str | None = None


def encode(documents: Iterable[Content], tokenizer: Tokenizer) -> Iterator[tuple[float, np.ndarray]]:
    """(share, tokens) of each document that has a token; `eos` closes those that were text, if there is one.

    Raises:
      DataError: lists documents that have no ids, or ids beyond the vocabulary.
    """
    documents, problems = iter(documents), Problems()
    while group := list(islice(documents, _TOGETHER)):
        for document, ids in zip(group, _tokens(group, tokenizer, problems), strict=True):
            if ids.size:
                yield _share(document, ids), ids
    problems.raise_any(DataError, HEADING)


def _tokens(group: list[Content], tokenizer: Tokenizer, problems: Problems) -> list[np.ndarray]:
    texts = [document.content for document in group if isinstance(document.content, str)]
    if isinstance(tokenizer, TokenizerFile) and len(texts) == len(group):
        with suppress(DataError):  # which does not say of what document
            return [_closed(ids, tokenizer) for ids in tokenizer.encode_all(texts)]
    return [_alone(document, tokenizer, problems) for document in group]


def _alone(document: Content, tokenizer: Tokenizer, problems: Problems) -> np.ndarray:
    try:
        if isinstance(document.content, str):
            return _closed(tokenizer.encode(document.content), tokenizer)
        check_ids(document.content, tokenizer.vocab_size)
        is_opened = document.content[:1].tolist() == [tokenizer.bos]
        return document.content[int(is_opened) :]  # each gets its opening when it is packed
    except DataError as error:
        problems.add(document.where, str(error))
        return np.zeros(0, np.int32)


def _share(document: Content, ids: np.ndarray) -> float:
    if document.name is not None:
        return share(os.fsencode(document.name))
    if isinstance(document.content, str):
        return share(document.content.encode("utf-8", "surrogatepass"))
    return share_of_ids(ids)


def _closed(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    return ids if tokenizer.eos is None or not ids.size else np.append(ids, np.array(tokenizer.eos, ids.dtype))


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Raises DataError where they are not integers of the vocabulary."""
    if ids.dtype.kind not in "iu":
        raise DataError(f"is {ids.dtype}, not token ids, which are integers")
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        beyond = ids.max() if ids.max() >= vocab_size else ids.min()
        raise DataError(f"has the token id {beyond}, outside of the vocabulary of {vocab_size}")
