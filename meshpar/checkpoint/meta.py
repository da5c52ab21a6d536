"""Validates `meta.json`: if another program wrote it, its checksum may be right and its content wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic

from meshpar.errors import CheckpointError
from meshpar.synonyms import with_new_names

FORMAT = 3
"""The version of the format that is written. Version 1 had no such number, and no sizes in `sha256.json`.

Up to version 2, configs and parameters had other names.
"""

Count = Annotated[int, pydantic.Field(ge=0)]


class _Part(pydantic.BaseModel):
    """A part of `meta.json`. Unknown keys are allowed and preserved."""

    model_config = pydantic.ConfigDict(extra="allow", strict=True)


class SavedArray(_Part):
    dtype: str
    shape: list[Count]
    dims: list[str] | None

    @pydantic.field_validator("dtype")
    @classmethod
    def _is_known(cls, name: str) -> str:
        try:
            np.dtype(name)
        except (TypeError, ValueError, SyntaxError):
            raise ValueError(f"{name!r} is not a dtype") from None
        return name


class SavedOrder(_Part):
    first: int
    since: Count
    pieces: Annotated[int, pydantic.Field(gt=0)]
    before: list[Count]


class Data(_Part):
    next_batch: Count
    rows_read: Count | None
    seed: int | None
    order: SavedOrder | None = None


class Random(_Part):
    seed: int | None
    impl: str
    folded_in: Count


class Metric(_Part):
    name: str
    best: Literal["lowest", "highest"]
    value: float | None


class Meta(_Part):
    format: Annotated[int, pydantic.Field(ge=1)] = 1
    step: Count
    saved: str
    config: dict[str, Any]
    arrays: dict[str, SavedArray]
    data: Data
    random: Random
    metric: Metric


class _Format(pydantic.BaseModel):
    format: int = 1


def parse(text: bytes, path: Path) -> dict[str, Any]:
    """The validated content of a `meta.json`.

    Raises:
      pydantic.ValidationError: it does not follow the schema.
      CheckpointError: a newer meshpar wrote it.
    """
    number = _Format.model_validate_json(text, strict=True).format
    if number > FORMAT:
        raise CheckpointError(f"{path} has format {number}, and this meshpar reads up to {FORMAT}: update meshpar")
    found = Meta.model_validate_json(text).model_dump()
    if found["data"]["order"] is None:  # an old checkpoint, or one without data
        del found["data"]["order"]
    return found if number > 2 else _with_new_names(found)


def _with_new_names(found: dict[str, Any]) -> dict[str, Any]:
    """The content with the names of format 3."""
    config = with_new_names(found["config"])
    model = config.get("model")
    if isinstance(model, dict) and model.get("kind") in ("llama", "gpt"):
        found["arrays"] = {re.sub(r"\btable$", "embedding", path): array for path, array in found["arrays"].items()}
    return found | {"config": config}
