"""An inspection as plain data, typed: what `as_json()` gives and `meshpar inspect --json` writes, read back.

What is drawn or compared is this, so that a file that was kept serves as well as a program that was just compiled.
Keys that are not known here are passed over: a newer meshpar may write more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pydantic

from meshpar.errors import Problem, ProgramError
from meshpar.inspection.program.memory import Held, Memory

Count = Annotated[int, pydantic.Field(ge=0)]
Bytes = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
_MOST = 8


class _Plain(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="ignore", defer_build=True)


class PlainCollective(_Plain):
    """As `Collective`; `sent_bytes` are those of one execution."""

    kind: str
    axes: tuple[str, ...] | None
    times: Count
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
    """Something that the program does and that could be cheaper; `bytes` are what it costs, where that is known."""

    kind: str
    what: str
    where: str = ""
    bytes: Bytes | None = None
    fix: str = ""


class PlainInspection(_Plain):
    """As `Inspection`, and the fields of a `Judgement` where it was compiled for a target."""

    mesh: dict[str, Count]
    sent_bytes: Count
    sent_bytes_per_axis: dict[str, Count]
    traced_bytes_per_axis: dict[str, Count] | None
    collectives: tuple[PlainCollective, ...]
    flops: Count
    memory: Memory
    largest: tuple[Held, ...]
    opaque: tuple[str, ...]
    findings: tuple[PlainFinding, ...] = ()
    target: str | None = None
    fits: bool | None = None
    chip_bytes: Count | None = None
    products_s_estimate: Bytes | None = None


def plain(told: Mapping[str, Any]) -> PlainInspection:
    """The data of `as_json()`, typed."""
    return PlainInspection.model_validate(told)


def read(path: Path) -> PlainInspection:
    """Reads a file that `meshpar inspect --json` wrote.

    Raises:
      ProgramError: it cannot be read, or is not such a file; lists what is wrong in it.
    """
    try:
        return PlainInspection.model_validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise ProgramError(f"{path} cannot be read: {error.strerror}") from None
    except pydantic.ValidationError as invalid:
        raise ProgramError(_said(path, invalid)) from None


def _said(path: Path, invalid: pydantic.ValidationError) -> str:
    """What is wrong in a file, as far as one wants to read it."""
    found = [Problem(".".join(map(str, e["loc"])) or "the file", e["msg"]) for e in invalid.errors(include_url=False)]
    rest = [f"  ... and {len(found) - _MOST} more"] * (len(found) > _MOST)
    heading = f"{path} was not written by `meshpar inspect --json`:"
    return "\n".join([heading, *map(str, found[:_MOST]), *rest])
