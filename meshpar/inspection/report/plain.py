"""The plain data of an inspection, as `as_json()` returns and `meshpar inspect --json` writes it, with types.

Text, page and comparison are rendered from this data, so they work for a stored file as for a program that was just
compiled. Unknown keys are ignored, because a newer meshpar may write more of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pydantic

from meshpar.errors import Problems, ProgramError
from meshpar.inspection.program.memory import Count, Held, Memory

Bytes = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Times = Annotated[Bytes, pydantic.AfterValidator(lambda times: int(times) if times.is_integer() else times)]
"""A number of executions: a fraction if only some devices take a branch."""


class _Plain(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="ignore", defer_build=True)


class PlainCollective(_Plain):
    """The fields of `Collective`; `sent_bytes` counts one execution."""

    kind: str
    axes: tuple[str, ...] | None
    is_in_parts: bool = False
    times: Times
    branches: tuple[str, ...]
    arrays: tuple[str, ...]
    sent_bytes: Bytes
    tensors: tuple[str, ...]
    source: str

    @property
    def total_bytes(self) -> float:
        """Bytes that a device sends in all executions."""
        return self.times * self.sent_bytes


class PlainFinding(_Plain):
    """The fields of `Finding`; `bytes` is its cost, None if it is unknown."""

    kind: str
    what: str
    where: str = ""
    bytes: Bytes | None = None
    fix: str = ""


class PlainInspection(_Plain):
    """The fields of `Inspection`, and those of `FitReport` if the program was compiled for a target."""

    mesh: dict[str, Count]
    sent_bytes: Count
    sent_bytes_per_axis: dict[str, Count]
    traced_bytes_per_axis: dict[str, Count] | None
    collectives: tuple[PlainCollective, ...]
    flops: Count
    memory: Memory
    largest: tuple[Held, ...]
    opaque: tuple[str, ...]
    model_states: dict[str, Count] | None = None
    selected: dict[str, str] = {}
    findings: tuple[PlainFinding, ...] = ()
    target: str | None = None
    fits: bool | None = None
    chip_bytes: Count | None = None
    products_s_estimate: Bytes | None = None


def plain(inspection: Mapping[str, Any] | PlainInspection) -> PlainInspection:
    """The data of `as_json()` with types; typed data are returned unchanged."""
    return PlainInspection.model_validate(inspection)


def read(path: Path) -> PlainInspection:
    """Reads a file that `meshpar inspect --json` wrote.

    Raises:
      ProgramError: the file cannot be read, or has another format; the message lists the problems.
    """
    try:
        return PlainInspection.model_validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise ProgramError(f"{path} cannot be read: {error.strerror}") from None
    except pydantic.ValidationError as invalid:
        problems = Problems()
        for one in invalid.errors(include_url=False):
            problems.add(".".join(map(str, one["loc"])) or "the file", one["msg"])
        problems.raise_any(ProgramError, f"{path} was not written by `meshpar inspect --json`:")
        raise
