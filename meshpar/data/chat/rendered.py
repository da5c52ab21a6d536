"""Files whose lines the chat template of a model renders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date as Date
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from pydantic import field_validator

from meshpar.config import Coerced, default
from meshpar.data.chat.targets import Encoder
from meshpar.data.chat.template import TEMPLATE, TOOL_USE, ChatTemplate, read_template
from meshpar.data.corpus import AtPath, Corpus
from meshpar.data.documents import is_held_out, no_data, share
from meshpar.data.file_ranges import FileRange
from meshpar.data.files import named
from meshpar.data.jsonl import lines, parse
from meshpar.data.reading import read_each
from meshpar.data.special_tokens import FILES, end_ids
from meshpar.data.tokenizer import Tokenizer, TokenizerFile

T = TypeVar("T")


class Rendered(AtPath, Corpus):
    """Files with a JSON object per line, which the chat template beside the tokenizer renders."""

    if_missing: ClassVar = {
        "tokenizer": "data.tokenizer=FOLDER/tokenizer.json; or an init whose model has one, which is the default then"
    }

    glob: str = "**/*.jsonl"
    tokenizer: Coerced[Tokenizer, str | dict[str, Any]]
    """The `tokenizer.json` of the model, with the template and the end ids beside it. Default: that of the model in
    `init`."""
    date: str | None = None
    """What a template writes as today's date. Default: such a template is refused."""
    template_options: dict[str, Any] = default({})
    """Further variables of the template, such as `enable_thinking: false`."""

    @field_validator("tokenizer")
    @classmethod
    def _is_file(cls, value: Tokenizer) -> Tokenizer:
        if not isinstance(value, TokenizerFile):
            raise ValueError(f"conversations need a tokenizer file, and the template beside it, not {value.kind}")
        return value

    @field_validator("date")
    @classmethod
    def _is_date(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                Date.fromisoformat(value)
            except ValueError:
                raise ValueError(f"{value!r} is no date such as 2026-11-26") from None
        return value

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def _file(self) -> TokenizerFile:
        assert isinstance(self.tokenizer, TokenizerFile)  # validated
        return self.tokenizer

    def named_files(self) -> dict[str, Path]:
        beside = {f"data.tokenizer: {name}": self._file.folder / name for name in (TEMPLATE, TOOL_USE, *FILES)}
        there = {name: path for name, path in beside.items() if path.is_file()}
        return named(self.files(), self.root) | {"data.tokenizer": Path(self._file.path)} | there

    def encoder(self, apart: bool = False) -> Encoder:
        """Encodes conversations.

        Args: see `Encoder`.

        Raises:
          DataError: there is no template, or a file cannot be read.
        """
        tokenizer, folder = self._file, self._file.folder
        ends = {one for one in (*end_ids(folder), tokenizer.eos) if one is not None}
        day = datetime.fromisoformat(self.date) if self.date else None
        return Encoder(tokenizer, self._template, ends, apart, day, self.template_options)

    def encoded(self, encode: Callable[[Any], T]) -> Iterator[tuple[float, T]]:
        """For each line the number that decides whether it is held out, and what `encode` makes of its JSON.

        Args:
          encode: raises ValueError(what is wrong), or ValueError(what is wrong, the fix).

        Raises:
          DataError: lists the lines that are wrong.
        """
        stored = lines(FileRange(tuple(self.files())))
        for _, line, found in read_each(stored, lambda line: encode(parse(line))):
            yield share(line.strip()), found

    def sides(self, shares: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
        """The places int64[n] of the lines that are trained on, and of those that are held out.

        Raises:
          DataError: all are held out, or none is.
        """
        held_out = is_held_out(np.array(shares), self.held_out_fraction)
        return np.flatnonzero(~held_out), np.flatnonzero(held_out)

    @property
    def _template(self) -> ChatTemplate:
        if (template := read_template(self._file.folder)) is None:
            fix = f"put the model's {TEMPLATE} beside it, or its tokenizer_config.json"
            raise no_data(f"data.tokenizer = {self._file.path!r}", "there is no chat template beside it", fix)
        if unread := template.unread(self.template_options):
            what = f"{', '.join(unread)}: changes nothing in the template"
            raise no_data("data.template_options", what, "leave it out")
        return template
