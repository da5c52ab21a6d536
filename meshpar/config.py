"""Typed, frozen config models (first cut; grows to YAML, overrides and error texts)."""

from __future__ import annotations

import pydantic


class Config(pydantic.BaseModel):
    """Base of everything that can be written in a config file: frozen, keyword-only, no unknown keys."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
