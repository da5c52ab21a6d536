"""Special tokens and end ids of a model, from the files beside its tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshpar.data.unmodified import kept_while_unmodified
from meshpar.errors import DataError, Problems
from meshpar.regular_files import open_regular

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENS_MAP = "special_tokens_map.json"
FILES = (CONFIG, GENERATION, TOKENIZER_CONFIG, TOKENS_MAP)
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LARGEST = 100_000_000


def special_tokens(folder: Path) -> dict[str, str]:
    """Name -> text of the special tokens that the files of a folder name, such as `bos_token`.

    As in transformers, `special_tokens_map.json` has priority unless `tokenizer_config.json` lists all added tokens.

    Raises:
      DataError: a file cannot be read.
    """
    config, named = _read(folder)[TOKENIZER_CONFIG], _read(folder)[TOKENS_MAP]
    both = config | named if "added_tokens_decoder" not in config else named | config
    tokens = {name: content(both.get(name)) or content(named.get(name)) for name in NAMES}
    return {name: token for name, token in tokens.items() if token is not None}


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """The `tokenizer_config.json` of a folder; empty if it has none.

    Raises:
      DataError: it cannot be read.
    """
    return _read(folder)[TOKENIZER_CONFIG]


def end_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end an answer: those of `generation_config.json`, or else of `config.json`; one or several.

    Raises:
      DataError: a file cannot be read.
    """
    files = _read(folder)
    return _ids(files[GENERATION].get("eos_token_id")) or _ids(files[CONFIG].get("eos_token_id"))


class SamplingDefaults(NamedTuple):
    """How a model's tokens are sampled unless a request says it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0


NEUTRAL = SamplingDefaults()
"""From the model's own probabilities."""


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """The settings in `generation_config.json`; those of sampling only if it says `do_sample`.

    Raises:
      DataError: a value is wrong, or the file cannot be read.
    """
    settings = _read(folder)[GENERATION]
    limits = {"repetition_penalty": (0.01, 10)}
    if settings.get("do_sample") is True:
        limits |= {"temperature": (0, 100), "top_p": (0, 1), "top_k": (0, 2**31 - 1), "min_p": (0, 1)}
    given: dict[str, Any] = {key: settings[key] for key in limits if settings.get(key) is not None}
    problems = Problems()
    for key, value in given.items():
        low, high = limits[key]
        if type(value) not in ((int,) if key == "top_k" else (int, float)) or not low <= value <= high:
            problems.add(f"{folder / GENERATION}: {key} = {value!r}", f"is not from {low} to {high}", "remove it")
    problems.raise_any(DataError, "how the model is sampled cannot be read:")
    return SamplingDefaults(**given | {"top_k": given.get("top_k") or None, "top_p": given.get("top_p") or 1.0})


def first_ids(folder: Path) -> tuple[int, ...]:
    """The `bos_token_id` of `config.json`, if it has one."""
    return _ids(_read(folder)[CONFIG].get("bos_token_id"))


def content(token: Any) -> str | None:
    """The text of a special token, which is stored as text or as an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _ids(value: Any) -> tuple[int, ...]:
    listed = value if isinstance(value, list) else [value]
    return tuple(one for one in listed if type(one) is int and one >= 0)


def _read(folder: Path) -> Mapping[str, dict[str, Any]]:
    """The JSON objects of `FILES`; empty ones of files that are not there."""
    return {name: _parsed(folder / name) if os.path.exists(folder / name) else {} for name in FILES}


@kept_while_unmodified(32)
def _parsed(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            value = json.loads(file.read(_LARGEST))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if path.name == CONFIG:  # a file of this name may be another program's
            return {}
        raise DataError(f"{path} is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}
