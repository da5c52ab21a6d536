"""Imports rows from a user's own function that a config names."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from meshpar.config import Target
from meshpar.data.rows.config import RowData
from meshpar.data.rows.dataset import Transform
from meshpar.data.rows.source import Source, as_source
from meshpar.errors import DataError
from meshpar.interop import user_code


class ImportedData(RowData):
    """Rows that a user's function returns: mappings of names to arrays.

    >>> ImportedData(target="my_data:rows", arguments={"split": "train"}, held_out={"split": "test"}).target
    'my_data:rows'
    """

    held_out_key: ClassVar = "held_out"

    kind: Literal["import"] = "import"
    target: Target
    """`package.module:name` of a function that returns rows: a Grain data set, a Hugging Face data set, a mapping of
    arrays, an object with `__len__` and `__getitem__`, or an iterator."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that function."""
    held_out: dict[str, Any] | None = None
    """Arguments for the rows of evaluations, in addition to `arguments`. Default: `held_out_fraction` of the rows."""
    transform: Target | None = None
    """`package.module:name` of a function (row, rng) -> row that changes each training row as it is read."""

    @cached_property
    def sources(self) -> tuple[Source, Source | None]:
        held_out = None if self.held_out is None else self._source(self.arguments | self.held_out)
        return self._source(self.arguments), held_out

    def row_transform(self, chosen: np.ndarray | None) -> Transform | None:
        return None if self.transform is None else user_code.load(self.transform)

    @property
    def label(self) -> str:
        return self.target

    def _source(self, arguments: dict[str, Any]) -> Source:
        build = user_code.load(self.target)
        if not callable(build):
            raise DataError(f"{self.target} is {type(build).__name__}, not a function that returns rows")

        def made() -> Any:
            with user_code.blamed(self.target):
                return partial(build, **arguments)()

        return as_source(made, self.target)
