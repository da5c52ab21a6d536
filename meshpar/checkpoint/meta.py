"""What `meta.json` must say. Its checksum may be right and its content wrong: another program may have written it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic

from meshpar.errors import CheckpointError

FORMAT = 2
"""Of the checkpoints that are written. The first format had no such number, and no sizes in `sha256.json`."""

Count = Annotated[int, pydantic.Field(ge=0)]


class _Part(pydantic.BaseModel):
    """Keys that are not named here stay: others may add theirs."""

    model_config = pydantic.ConfigDict(extra="allow", strict=True)


class Array(_Part):
    dtype: str
    shape: list[Count]
    dims: list[str] | None

    @pydantic.field_validator("dtype")
    @classmethod
    def _is_known(cls, name: str) -> str:
        try:
            np.dtype(name)
        except (TypeError, ValueError, SyntaxError):
            raise ValueError(f"{name!r} is no dtype") from None
        return name


class Data(_Part):
    next_batch: Count
    rows_read: Count | None
    seed: int | None


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
    arrays: dict[str, Array]
    data: Data
    random: Random
    metric: Metric


class _Format(pydantic.BaseModel):
    format: int = 1


def parse(text: bytes, path: Path) -> dict[str, Any]:
    """The content of a `meta.json`.

    Raises:
      pydantic.ValidationError: it is not what a checkpoint says.
      CheckpointError: a newer meshpar wrote it.
    """
    number = _Format.model_validate_json(text, strict=True).format
    if number > FORMAT:
        raise CheckpointError(f"{path} has format {number}, and this meshpar reads up to {FORMAT}: update meshpar")
    return Meta.model_validate_json(text).model_dump()
