"""Files whose lines the chat template of a model renders."""

from __future__ import annotations

from datetime import date as Date
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from pydantic import field_validator

from meshpar.config import Coerced, default
from meshpar.data.chat.targets import Encoder
from meshpar.data.chat.template import TEMPLATE, TOOL_USE, ChatTemplate, read_template
from meshpar.data.corpus import AtPath, Corpus
from meshpar.data.documents import no_data
from meshpar.data.files import named
from meshpar.data.special_tokens import FILES, end_ids
from meshpar.data.tokenizer import Tokenizer, TokenizerFile


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

    @property
    def _template(self) -> ChatTemplate:
        if (template := read_template(self._file.folder)) is None:
            fix = f"put the model's {TEMPLATE} beside it, or its tokenizer_config.json"
            raise no_data(f"data.tokenizer = {self._file.path!r}", "there is no chat template beside it", fix)
        if unread := template.unread(self.template_options):
            what = f"{', '.join(unread)}: changes nothing in the template"
            raise no_data("data.template_options", what, "leave it out")
        return template
