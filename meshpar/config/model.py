"""What every config model has in common, and the integers that its fields hold."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import pydantic

from meshpar.config.annotations import fields
from meshpar.config.explaining import explain
from meshpar.config.shorthand import expand, typed
from meshpar.errors import ConfigError, Problems

LARGEST = 2**31 - 1
"""Sizes and counts end here: steps, token ids and the indices of an array are 32-bit integers in JAX."""

Positive = Annotated[int, pydantic.Field(gt=0, le=LARGEST)]
"""A size, or a number of things of which there is at least one."""
Count = Annotated[int, pydantic.Field(ge=0, le=LARGEST)]
"""A number of things of which there may be none."""
Seed = Annotated[int, pydantic.Field(ge=0, lt=2**32)]
"""JAX uses the lower 32 bits of a seed: beyond them, two seeds would draw the same numbers."""
Target = Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]
"""`package.module:name` of a user's own code; `meshpar.interop.user_code` imports it."""


class Config(pydantic.BaseModel):
    """Base of everything that can be written in a config file: frozen, keyword-only, no unknown keys.

    Python may write the keys as a file does: a bare value for a mapping, a mapping with its `kind` for a config, a list
    for a tuple, a text for a path. Types are as strict as in a file: a text is no number.
    """

    # Pydantic builds a validator when it is first used: importing meshpar should cost next to nothing.
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False, strict=True)

    shorthand: ClassVar[str | None] = None
    """The key that a bare value in place of a mapping stands for."""

    def __init__(self, /, **data: Any) -> None:
        """Checks the keys as those of a file.

        Raises:
          ConfigError: lists every problem.
        """
        name = type(self).__name__
        problems = Problems()
        try:
            super().__init__(**data)
        except pydantic.ValidationError as invalid:
            for where, what, fix in explain(type(self), expand(type(self), data), invalid):
                problems.add(name if where == "the file" else where, what, fix)
        problems.raise_any(ConfigError, f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in {name}:")

    # Within another config, pydantic validates this one itself, and reports all problems at once.
    __init__.__pydantic_base_init__ = True  # pyright: ignore

    @pydantic.model_validator(mode="before")
    @classmethod
    def _from_plain_data(cls, data: Any, info: pydantic.ValidationInfo) -> Any:
        data = expand(cls, data)
        if not isinstance(data, dict):
            return data
        known = fields(cls)
        return {key: typed(known.get(key), value, info.mode == "json") for key, value in data.items()}
