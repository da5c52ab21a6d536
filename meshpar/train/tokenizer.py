"""Tokenizers: text to ids of a vocabulary, and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from meshpar.errors import DataError


class Tokenizer(Protocol):
    """What reads and writes text for a model."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos(self) -> int: ...
    @property
    def eos(self) -> int | None: ...
    def encode(self, text: str) -> np.ndarray: ...
    def decode(self, ids: Iterable[int]) -> str: ...


class Bytes:
    """The bytes of UTF-8, and an id that opens a document."""

    vocab_size: ClassVar[int] = 257
    bos: ClassVar[int] = 256
    eos: ClassVar[None] = None

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


@dataclass(frozen=True)
class Ids:
    """Ids that are what they are; as text, numbers with spaces between them."""

    vocab_size: int
    bos: int
    eos: int | None = None

    def encode(self, text: str) -> np.ndarray:
        try:
            return np.array([int(word) for word in text.split()], np.int64)
        except ValueError:
            raise DataError(f"{text!r} is not a line of token ids, such as '3 1 4'") from None

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(i) for i in ids)
