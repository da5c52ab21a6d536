"""A row of the training data as text, with the parts that the model learns to write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np

from meshpar.data.corpus import Batching
from meshpar.data.dataset import Dataset
from meshpar.data.tokenizer import Tokenizer, TokenizerFile
from meshpar.errors import ConfigError, printable

OPEN, CLOSE = "\u27e6", "\u27e7"
"""Around what is learned, where there are no colors."""


@dataclass(frozen=True)
class Part:
    """Consecutive tokens that are all learned, or none of them."""

    text: str
    is_learned: bool
    tokens: list[int]


@dataclass(frozen=True)
class ShownRow:
    """A row of the training data.

    Args:
      documents: the parts of each document in it.
      about: numbers of the data and of the row.
    """

    documents: list[list[Part]]
    about: str

    def __str__(self) -> str:
        return self.text(lambda text: f"{OPEN}{text}{CLOSE}")

    def text(self, learned: Any) -> str:
        """The row, with `learned` applied to each text that is learned. Control characters are escaped."""
        texts = [
            "".join(learned(printable(part.text)) if part.is_learned else printable(part.text) for part in parts)
            for parts in self.documents
        ]
        headings = [f"-- document {number}" for number in range(1, 1 + len(texts))]
        return "\n".join([self.about, *(line for pair in zip(headings, texts, strict=True) for line in pair)])

    def as_json(self) -> dict[str, Any]:
        return {"about": self.about, "documents": [[asdict(part) for part in parts] for parts in self.documents]}


def show(data: Batching, seed: int, row: int) -> ShownRow:
    """Row number `row` that a training with this seed reads.

    Raises:
      ConfigError: there is no such row.
      DataError: the data cannot be read.
    """
    train, held_out = data.datasets(seed)
    if not 0 <= row < train.num_rows:
        raise ConfigError(f"--row {row}: an epoch has the rows 0 to {train.num_rows - 1}")
    index, place = divmod(row, train.batch_size)
    batch = {name: array[0] for name, array in train.rows(index, [place]).items()}
    documents = [_parts(data.tokenizer, *one) for one in _documents(batch)]  # pyright: ignore
    learned = int((batch["targets"] >= 0).sum())
    used = int((batch["segments"] > 0).sum()) if "segments" in batch else data.seq_len
    row_about = f"row {row}: {_count(len(documents), 'document')}, {used} of {data.seq_len} tokens, {learned} learned"
    return ShownRow(documents, f"{_about('train', train)}; {_about('held out', held_out)}\n{row_about}")


def _about(name: str, data: Dataset) -> str:
    documents, rows = _count(data.num_documents, "document"), _count(data.num_rows, "row")
    return f"{name}: {documents}, {data.num_tokens:,} tokens in {rows}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def _documents(batch: dict[str, np.ndarray]) -> Iterator[tuple[list[int], list[bool]]]:
    """The tokens of each document, and whether each is learned: whether it is the target of the one before."""
    segments = batch.get("segments", np.ones_like(batch["tokens"]))
    for segment in range(1, segments.max() + 1):
        of = segments == segment
        tokens, targets = batch["tokens"][of].tolist(), batch["targets"][of].tolist()
        last = targets[-1]  # it may be no input of this row
        is_learned = [False, *(target >= 0 for target in targets)]
        yield ([*tokens, last], is_learned) if last >= 0 else (tokens, is_learned[:-1])


def _parts(tokenizer: Tokenizer, tokens: list[int], is_learned: list[bool]) -> list[Part]:
    """A token's text may depend on those before it, so each part is what a longer text has more."""
    parts, text, at = [], "", 0
    for learned, group in groupby(is_learned):
        start, at = at, at + len(list(group))
        longer = _decoded(tokenizer, tokens[:at])
        parts.append(Part(longer[len(text) :], learned, tokens[start:at]))
        text = longer
    return parts


def _decoded(tokenizer: Tokenizer, tokens: list[int]) -> str:
    is_file = isinstance(tokenizer, TokenizerFile)
    return tokenizer.decode_special(tokens) if is_file else tokenizer.decode(tokens)
