"""Tokenizers: convert text to the ids of a vocabulary, and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from meshpar.config import Config, Count, PathText, Positive
from meshpar.data.special_tokens import end_ids, first_ids, special_tokens
from meshpar.data.unmodified import kept_while_unmodified
from meshpar.errors import DataError, Problem, nearest
from meshpar.regular_files import check_regular, nearby

HEADING = "the tokenizer cannot be used:"
LARGEST_ID = 2**31 - 2
"""The largest id of a tokenizer file: one more, used for `bos` where the file has none, must still fit an int32."""
_OPENING = ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|endoftext|>")
_CLOSING = ("</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|endoftext|>")


class Bytes(Config):
    """The bytes of UTF-8, and one more id that opens a document.

    >>> tokenizer = Bytes()
    >>> tokenizer.encode("né").tolist()
    [110, 195, 169]
    >>> tokenizer.decode([tokenizer.bos, 110, 195, 169])
    'né'
    """

    kind: Literal["bytes"] = "bytes"

    @property
    def vocab_size(self) -> int:
        """The number of ids; all ids are smaller."""
        return 257

    @property
    def bos(self) -> int:
        """The id that opens a document."""
        return 256

    @property
    def eos(self) -> None:
        """The id that closes a document, if the tokenizer has one."""
        return None

    def encode(self, text: str) -> np.ndarray:
        """uint8[length], without `bos`. Bytes that are not UTF-8 are restored if they were read with `surrogateescape`.

        Raises:
          DataError: the text is not valid Unicode.
        """
        return np.frombuffer(_utf8(text, "surrogateescape"), np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; ids without text, such as `bos`, are skipped."""
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


class Ids(Config):
    """Data that consist of token ids; their text is the decimal numbers, separated by spaces.

    >>> tokenizer = Ids(vocab_size=10, bos=9)
    >>> tokenizer.encode("3 1 4").tolist()
    [3, 1, 4]
    >>> tokenizer.decode([3, 9, 1])
    '3 9 1'
    """

    kind: Literal["ids"] = "ids"
    vocab_size: Positive
    """The number of ids; all ids are smaller."""
    bos: Count
    """The id that opens a document."""
    eos: Count | None = None
    """The id that closes a document, if the data have one."""

    @model_validator(mode="after")
    def _check(self) -> Ids:
        if beyond := [i for i in (self.bos, self.eos) if i is not None and i >= self.vocab_size]:
            raise ValueError(f"the id {beyond[0]} is outside of the vocabulary of {self.vocab_size}")
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
        """All ids: in a model without a tokenizer, any of them may be a token like the others."""
        return " ".join(map(str, ids))


class TokenizerFile(Config):
    """A `tokenizer.json` of Hugging Face's tokenizers library; needs the extra `data`.

    A special token that occurs in a text is encoded as ordinary characters, so text cannot open a document.
    """

    shorthand: ClassVar[str] = "path"
    any_text: ClassVar = ("bos_token", "eos_token")

    kind: Literal["file"] = "file"
    path: PathText
    """The local file, relative to the working directory."""
    bos_token: str | None = None
    """The token that opens a document. Default: that of the files in its folder; else `<s>` or another customary token;
    else one more id."""
    eos_token: str | None = None
    """The token that closes a document. Default: an end id of the model in its folder; else `</s>` or another customary
    token."""

    @property
    def vocab_size(self) -> int:
        return max(self._last, self.bos) + 1

    @property
    def bos(self) -> int:
        index = self._id("bos_token", self.bos_token, _OPENING)
        return self._last + 1 if index is None else index

    @property
    def eos(self) -> int | None:
        return self._id("eos_token", self.eos_token, _CLOSING)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text; the library encodes the texts in parallel."""
        with self._encoding(*texts):
            encoded = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.uint32) for one in encoded]

    def encode_special(self, text: str) -> np.ndarray:
        """The ids of a text in which special tokens count as such: for texts that a chat template rendered."""
        return self.encode_with_places(text)[0]

    def encode_whole(self, text: str) -> list[int]:
        """The ids of a text with those that the file's template inserts before and after it, as encoders read it."""
        with self._encoding(text):
            return list(self._library.encode(text).ids)

    def encode_with_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """As `encode_special`, and int[length, 2]: the characters of the text where each token starts and ends."""
        with self._encoding(text):
            encoded = _with_special(self._library).encode(text, add_special_tokens=False)
        return np.array(encoded.ids, np.uint32), np.array(encoded.offsets, np.int64).reshape(-1, 2)

    @contextmanager
    def _encoding(self, *texts: str) -> Iterator[None]:
        for text in texts:
            _utf8(text, "strict")  # the library would raise a TypeError
        with _failing_as(lambda error: DataError(f"cannot be encoded by {self.path}: {error}")):
            yield

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        with _failing_as(lambda error: DataError(f"cannot be decoded by {self.path}: {error}")):
            return self._library.decode([i for i in ids if i <= self._last], skip_special_tokens)

    def decode_special(self, ids: Iterable[int]) -> str:
        """The text of the ids, with that of special tokens."""
        return self.decode(ids, skip_special_tokens=False)

    def decode_keeping(self, ids: Iterable[int], kept: Collection[int]) -> str:
        """As `decode`, with the texts of those special tokens that are kept."""
        special = self._library.get_added_tokens_decoder()
        return self.decode_special(i for i in ids if i in kept or not (i in special and special[i].special))

    @property
    def opening(self) -> tuple[int, ...]:
        """The special ids that the file's template inserts before a text; some models were trained without any.

        As in transformers, `add_bos_token` in `tokenizer_config.json` changes nothing where there is this file.
        """
        with self._encoding():
            encoded = self._library.encode("a")
        special = takewhile(lambda one: one[1], zip(encoded.ids, encoded.special_tokens_mask, strict=True))
        return tuple(i for i, _ in special)

    def as_json(self) -> str:
        """The content of a `tokenizer.json` like this one."""
        return self._library.to_str()

    def opening_with_bos(self) -> str:
        """The content of a `tokenizer.json` like this one, which opens each text with `bos`, if the file has it."""
        token = self.token(self.bos)
        if token is None or self.opening == (self.bos,):
            return self._library.to_str()
        from tokenizers.processors import TemplateProcessing

        copy = type(self._library).from_str(self._library.to_str())
        copy.post_processor = TemplateProcessing(single=[token, "$A"], special_tokens=[(token, self.bos)])
        return copy.to_str()

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The texts of the special tokens."""
        return tuple(t.content for t in self._library.get_added_tokens_decoder().values() if t.special)

    def id_of(self, token: str) -> int | None:
        """The id of a token; None if there is none."""
        return self._library.token_to_id(token)

    def token(self, index: int) -> str | None:
        """The token of an id; None if the id is unused."""
        return self._library.id_to_token(index)

    @property
    def _library(self) -> Any:
        return self._opened[0]

    @property
    def _last(self) -> int:
        """The largest id. Smaller ids may be unused, so it is not the number of tokens."""
        return self._opened[1]

    @property
    def _opened(self) -> tuple[Any, int]:
        try:
            check_regular(Path(self.path))
            return _open(self.path)
        except OSError as error:
            what = f"cannot be read: {error.strerror}"
            raise _unusable(f"tokenizer = {self.path!r}", what, nearby(Path(self.path))) from None

    @property
    def folder(self) -> Path:
        """The folder of the file, whose other files may describe a model and its special tokens."""
        return Path(self.path).parent

    def _beside(self, key: str) -> int | None:
        """The id that the files beside this one give to a special token."""
        named = self._library.token_to_id(special_tokens(self.folder).get(key, ""))
        ids = [
            one for one in (end_ids if key == "eos_token" else first_ids)(self.folder) if self.token(one) is not None
        ]
        return named if named in ids or not ids or (named is not None and key == "bos_token") else ids[0]

    def _id(self, key: str, token: str | None, customary: Sequence[str]) -> int | None:
        """The id of `token`; without one, that of the files beside; or the first customary token that the file has."""
        find = self._library.token_to_id
        if token is None:
            beside = self._beside(key)
            return next((i for i in map(find, customary) if i is not None), None) if beside is None else beside
        if (index := find(token)) is None:
            special = self.special_tokens
            near = nearest(token, special)
            fix = f"did you mean {near!r}?" if near else f"its special tokens are {list(special)}"
            raise _unusable(f"tokenizer.{key} = {token!r}", f"{self.path} has no such token", fix)
        return index


Tokenizer = Annotated[TokenizerFile | Bytes | Ids, Field(discriminator="kind")]
"""Converts between text and the token ids of a model; selected by `kind` in a config."""


@kept_while_unmodified(4)
def _open(path: str) -> tuple[Any, int]:
    """The library's tokenizer and its largest id."""
    try:
        from tokenizers import Tokenizer as Library
    except ImportError:
        raise missing_extra("a tokenizer file", "tokenizers") from None
    fix = "use a tokenizer.json that the tokenizers library has written"
    with _failing_as(lambda error: _unusable(f"tokenizer = {path!r}", f"is not a tokenizer: {error}", fix)):
        library = Library.from_file(path)
    library.no_padding()
    library.no_truncation()
    library.encode_special_tokens = True
    last = max(library.get_vocab(with_added_tokens=True).values(), default=-1)
    if last >= LARGEST_ID:
        what = f"has the id {last}, and ids must be below {LARGEST_ID}"
        raise _unusable(f"tokenizer = {path!r}", what, "download it again")
    return library, last


@lru_cache(maxsize=1)
def _with_special(library: Any) -> Any:
    """A copy of the library's tokenizer that encodes special tokens in a text as such."""
    copy = type(library).from_str(library.to_str())
    copy.encode_special_tokens = False
    return copy


@contextmanager
def _failing_as(refusal: Callable[[BaseException], DataError]) -> Iterator[None]:
    """Raises a `DataError` for what the library raises, which has no narrower type."""
    try:
        yield
    except DataError:
        raise
    except BaseException as error:
        # A panic of its Rust code is no `Exception`, and its class is not exported.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise refusal(error) from None
        raise


def missing_extra(what: str, library: str) -> DataError:
    return DataError(f"{what} needs {library}, which is not installed: pip install 'meshpar[data]'")


def _unusable(where: str, what: str, fix: str) -> DataError:
    return DataError(f"{HEADING}\n{Problem(f'data.{where}', what, fix)}")


def _utf8(text: str, errors: str) -> bytes:
    try:
        return text.encode("utf-8", errors)
    except UnicodeEncodeError as error:
        raise DataError(f"the text is not valid Unicode: {error.reason} at character {error.start}") from None
