"""Writes keys and defaults of transformers' config classes: `meshpar/models/config_classes.py`.

Run it again for another version of transformers: `python scripts/config_classes.py`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import textwrap
import typing
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from meshpar.interop.architectures import ARCHITECTURES
from meshpar.models.encoders import ENCODERS
from meshpar.models.families import FAMILIES
from meshpar.models.foreign import WITHOUT_EFFECT

PATH = Path(__file__).parents[1] / "meshpar/models/config_classes.py"
OF_LLAMA = ("internlm3",)
"""Kinds whose model is that of llama."""
TABLES = "# fmt: off\n"
"""The line of the file after which it is written."""


def described(kind: str) -> tuple[str, dict[str, Any], list[str], dict[str, str], list[str]]:
    """The parts of a `ConfigClass`, with the keys of its base class."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    config_class = CONFIG_MAPPING[kind]
    fields = dataclasses.fields(config_class)
    defaults = {field.name: field.default for field in fields}
    rotary = {"rope_theta": getattr(config_class, "default_theta", 1e4)} if "rope_parameters" in defaults else {}
    nullable = sorted(field.name for field in fields if type(None) in typing.get_args(field.type))
    beside = {"per_layer_config", "quantization_config", *keys_used(kind, "getattr"), *_taken(config_class)}
    beside -= {*defaults, *rotary}
    beside |= {"rope_scaling", "partial_rotary_factor"} if rotary else set()
    return config_class.__name__, defaults | rotary, nullable, config_class.attribute_map, sorted(beside)


def _taken(config_class: Any) -> set[str]:
    """The keys that a class takes from a config without having them as fields."""
    source = inspect.getsource(config_class)
    return {*re.findall(r'kwargs\.(?:get|pop|setdefault)\(\s*"(\w+)"', source)}


def keys_used(kind: str, how: Literal["getattr", "any"]) -> set[str]:
    """The keys of a config that the code of a kind's model reads: with `getattr`, which needs no such field; or any."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    module = CONFIG_MAPPING[kind].__module__.replace("configuration_", "modeling_")
    modeling = importlib.import_module("transformers.models.llama.modeling_llama" if kind in OF_LLAMA else module)
    source = inspect.getsource(modeling)
    found = {*re.findall(r'getattr\((?:self\.)?config, "([a-z]\w*)"', source)}
    return found if how == "getattr" else found | {*re.findall(r"config\.([a-z]\w*)", source)}


def text() -> str:
    """The whole file."""
    of_families = [kind for kind, family in FAMILIES.items() if family.called is None and kind not in ARCHITECTURES]
    of_encoders = [one for kind, family in ENCODERS.items() for one in (kind, *family.parts.values())]
    found = {kind: described(kind) for kind in (*ARCHITECTURES, *of_families, *of_encoders)}
    usual = _usual([defaults for _, defaults, *_ in found.values()])
    table = _wrapped(f"USUAL: Mapping[str, Any] = {usual!r}", 0)
    entries = "".join(_entry(kind, usual, *parts) for kind, parts in found.items())
    values = '"""The defaults that many classes have."""'
    head = PATH.read_text().partition(TABLES)[0]
    return f"{head}{TABLES}{table}{values}\nCONFIG_CLASSES: Mapping[str, ConfigClass] = {{\n{entries}}}\n"


def _usual(classes: list[dict[str, Any]]) -> dict[str, Any]:
    """The values of keys that a third of the classes have, or more."""
    counts = Counter((key, repr(value)) for defaults in classes for key, value in defaults.items())
    values = {(key, repr(value)): value for defaults in classes for key, value in defaults.items()}
    found: dict[str, Any] = {}
    for key, written in [one for one, count in counts.most_common() if 3 * count >= len(classes)]:
        found.setdefault(key, values[key, written])
    return found


def _entry(
    kind: str, usual: dict[str, Any], called: str, defaults: dict[str, Any], nullable: list[str],
    aliases: dict[str, str], beside: list[str],
) -> str:  # fmt: skip
    """A line of the table: what the class has in other ways than usual, and what `_of` cannot tell."""
    own = {key: value for key, value in defaults.items() if key not in usual or repr(usual[key]) != repr(value)}
    by_rule = {"per_layer_config", "quantization_config", "partial_rotary_factor", "rope_scaling"}
    more: dict[str, Any] = {
        "without": [key for key in usual if key not in defaults],
        "nullable": [key for key in nullable if defaults[key] is not None and key not in WITHOUT_EFFECT],
        "aliases": aliases,
        "beside": [key for key in beside if key not in by_rule],
    }
    arguments = [repr(called), repr(own), *(f"{name}={value!r}" for name, value in more.items() if value)]
    return _wrapped(f"{kind!r}: _of({', '.join(arguments)}),", 4)


def _wrapped(text: str, indent: int) -> str:
    text = text.replace("'", '"')
    start = " " * indent
    return textwrap.fill(
        text, 118, initial_indent=start, subsequent_indent=f"{start}    ", break_long_words=False
    ) + "\n"  # fmt: skip


if __name__ == "__main__":
    PATH.write_text(text())
