"""Tokenizers: text to ids of a vocabulary, and back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
from pydantic import Field, model_validator

from meshpar.config import Config, Count, Positive
from meshpar.errors import DataError, Problem, nearest
from meshpar.regular import open_regular

HEADING = "the tokenizer cannot be used:"
LARGEST_ID = 2**31 - 2
"""One more must still be an int32: the token that opens a document, where a file has none."""
_OPENING = ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|endoftext|>")
_CLOSING = ("</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|endoftext|>")


class Tokenizer(Protocol):
    """What reads and writes text for a model; `run.data.tokenizer` is one."""

    @property
    def vocab_size(self) -> int:
        """All ids are below it."""
        ...

    @property
    def bos(self) -> int:
        """The id that opens a document."""
        ...

    @property
    def eos(self) -> int | None:
        """The id that closes a document, if there is one."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """integers[length], without `bos` and `eos`.

        Raises:
          DataError: this text has no ids.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; those that stand for none, such as `bos`, are left out."""
        ...


class Bytes(Config):
    """The bytes of UTF-8, and an id that opens a document.

    >>> tokenizer = Bytes()
    >>> tokenizer.encode("né").tolist()
    [110, 195, 169]
    >>> tokenizer.decode([tokenizer.bos, 110, 195, 169])
    'né'
    """

    kind: Literal["bytes"] = "bytes"

    @property
    def vocab_size(self) -> int:
        return 257

    @property
    def bos(self) -> int:
        return 256

    @property
    def eos(self) -> None:
        return None

    def encode(self, text: str) -> np.ndarray:
        """uint8[length]. What was no UTF-8 when it was read with `surrogateescape` are the bytes that it was."""
        return np.frombuffer(_utf8(text, "surrogateescape"), np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


class Ids(Config):
    """Ids that are what they are; as text, numbers with spaces between them.

    >>> tokenizer = Ids(vocab_size=10, bos=9)
    >>> tokenizer.encode("3 1 4").tolist()
    [3, 1, 4]
    >>> tokenizer.decode([9, 3, 1])
    '3 1'
    """

    kind: Literal["ids"] = "ids"
    vocab_size: Positive
    """All ids are below it."""
    bos: Count
    """The id that opens a document."""
    eos: Count | None = None
    """The id that closes a document, if there is one."""

    @model_validator(mode="after")
    def _check(self) -> Ids:
        if beyond := [i for i in (self.bos, self.eos) if i is not None and i >= self.vocab_size]:
            raise ValueError(f"the id {beyond[0]} lies outside of the vocabulary of {self.vocab_size}")
        return self

    def encode(self, text: str) -> np.ndarray:
        try:
            ids = np.array([int(word) for word in text.split()], np.int64)
        except ValueError:
            raise DataError(f"{text!r} is not a line of token ids, such as '3 1 4'") from None
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise DataError(f"{text!r} has an id outside of the vocabulary of {self.vocab_size}")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(i) for i in ids if i not in (self.bos, self.eos))


class TokenizerFile(Config):
    """A `tokenizer.json` of Hugging Face's tokenizers library; needs the extra `data`.

    Special tokens that stand in a text are encoded as the letters that they are: text cannot open a document.
    """

    shorthand: ClassVar[str] = "path"

    kind: Literal["file"] = "file"
    path: str
    """The file, relative to the working directory."""
    bos_token: str | None = None
    """The token that opens a document. Default: `<s>` or another that is customary; if the file has none of them,
    one more id than it has."""
    eos_token: str | None = None
    """The token that closes a document. Default: `</s>` or another that is customary; if the file has none, none."""

    @property
    def vocab_size(self) -> int:
        return max(self._last, self.bos) + 1

    @property
    def bos(self) -> int:
        named = self._id("bos_token", self.bos_token, _OPENING)
        return self._last + 1 if named is None else named

    @property
    def eos(self) -> int | None:
        return self._id("eos_token", self.eos_token, _CLOSING)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Each text's ids; the library encodes them in parallel."""
        for text in texts:
            _utf8(text, "strict")  # of which the library says a TypeError
        try:
            encoded = self._library.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"cannot be encoded by {self.path}: {error}") from None
        return [np.array(one.ids, np.uint32) for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return self._library.decode([i for i in ids if i <= self._last])

    @property
    def opening(self) -> tuple[int, ...]:
        """The special ids that the file's own template puts before a text; some models were trained without any."""
        encoded = self._library.encode("a")
        special = takewhile(lambda one: one[1], zip(encoded.ids, encoded.special_tokens_mask, strict=True))
        return tuple(i for i, _ in special)

    def token(self, index: int) -> str | None:
        """What an id is called, if it is one."""
        return self._library.id_to_token(index)

    @property
    def _library(self) -> Any:
        return self._opened[0]

    @property
    def _last(self) -> int:
        """Its greatest id: one below it may be missing, so that a count would not do."""
        return self._opened[1]

    @property
    def _opened(self) -> tuple[Any, int]:
        try:
            with open_regular(Path(self.path)) as file:
                stat = os.fstat(file.fileno())
        except OSError as error:
            what, fix = f"cannot be read: {error.strerror}", f"it is relative to the working directory, {Path.cwd()}"
            raise _unusable(f"tokenizer = {self.path!r}", what, fix) from None
        return _open(self.path, stat.st_mtime_ns, stat.st_size)

    def _id(self, key: str, token: str | None, customary: Sequence[str]) -> int | None:
        """The id of the token that was named, or of the first customary one that there is."""
        find = self._library.token_to_id
        if token is None:
            return next((i for i in map(find, customary) if i is not None), None)
        if (found := find(token)) is None:
            special = [t.content for t in self._library.get_added_tokens_decoder().values() if t.special]
            near = nearest(token, special)
            fix = f"did you mean {near!r}?" if near else f"its special tokens are {special}"
            raise _unusable(f"tokenizer.{key} = {token!r}", f"{self.path} has no such token", fix)
        return found


def tokenizer_file(tokenizer: Tokenizer) -> dict[str, Path]:
    """The file of a tokenizer that has one, by a name."""
    return {"data.tokenizer": Path(tokenizer.path)} if isinstance(tokenizer, TokenizerFile) else {}


AnyTokenizer = Annotated[TokenizerFile | Bytes | Ids, Field(discriminator="kind")]


@lru_cache(maxsize=4)
def _open(path: str, modified_ns: int, size: int) -> tuple[Any, int]:
    """The library's tokenizer and its greatest id; a file is read once, as long as it stays what it is."""
    try:
        from tokenizers import Tokenizer as Library
    except ImportError:
        raise missing_extra("a tokenizer file", "tokenizers") from None
    try:
        library = Library.from_file(path)
    except Exception as error:  # the library raises nothing narrower
        fix = "give a tokenizer.json as the tokenizers library writes it"
        raise _unusable(f"tokenizer = {path!r}", f"is not a tokenizer: {error}", fix) from None
    library.no_padding()
    library.no_truncation()
    library.encode_special_tokens = True
    last = max(library.get_vocab(with_added_tokens=True).values(), default=-1)
    if last >= LARGEST_ID:
        raise _unusable(f"tokenizer = {path!r}", f"has the id {last}, and ids are below {LARGEST_ID}", "fetch it again")
    return library, last


def missing_extra(what: str, library: str) -> DataError:
    return DataError(f"{what} needs {library}, which is not installed: pip install 'meshpar[data]'")


def _unusable(where: str, what: str, fix: str) -> DataError:
    return DataError(f"{HEADING}\n{Problem(f'data.{where}', what, fix)}")


def _utf8(text: str, errors: str) -> bytes:
    try:
        return text.encode("utf-8", errors)
    except UnicodeEncodeError as error:
        raise DataError(f"a text is not Unicode: {error.reason} at character {error.start}") from None
