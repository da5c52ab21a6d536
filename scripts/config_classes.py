"""Writes keys and defaults of transformers' config classes: `config_classes.py` in `meshpar/models` and in `families`.

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
from pathlib import Path
from typing import Any, Literal

from meshpar.interop.architectures import ARCHITECTURES
from meshpar.models.encoders import ENCODERS
from meshpar.models.families import FAMILIES

PATH = Path(__file__).parents[1] / "meshpar/models/config_classes.py"
OF_LLAMA = ("internlm3",)
"""Kinds whose model is that of llama."""
OF_FAMILIES = PATH.parent / "families/config_classes.py"
OF_ENCODERS = PATH.parent / "encoders/config_classes.py"
HEAD = '''\
"""Keys and defaults of the config classes of transformers. `scripts/config_classes.py` writes this file.

`rope_theta` is the base of the rotary frequencies if `rope_parameters` has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class ConfigClass(NamedTuple):
    """A config class.

    Args:
      defaults: key -> the value of a missing key, in the order of the class.
      nullable: the keys that may be null.
      aliases: another name of a key -> the key.
      beside: keys that the class does not list, and transformers reads if a config has them.
    """

    called: str
    defaults: Mapping[str, Any]
    nullable: frozenset[str]
    aliases: Mapping[str, str]
    beside: frozenset[str]


# fmt: off
CONFIG_CLASSES: Mapping[str, ConfigClass] = {
'''


HEAD_OF_FAMILIES = '''\
"""Keys and defaults of the config classes of {these}. `scripts/config_classes.py` writes this file."""

from __future__ import annotations

from collections.abc import Mapping

from meshpar.models.config_classes import ConfigClass

# fmt: off
CONFIG_CLASSES: Mapping[str, ConfigClass] = {{
'''


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
    """The whole file of meshpar's own decoders."""
    entries = [_entry(kind, *described(kind)) for kind in ARCHITECTURES]
    return HEAD + "".join(entries) + "}\n"


def text_of_families() -> str:
    """The whole file of the families."""
    kinds = [kind for kind, family in FAMILIES.items() if family.called is None and kind not in ARCHITECTURES]
    return (
        HEAD_OF_FAMILIES.format(these="the families")
        + "".join(_entry(kind, *described(kind)) for kind in kinds)
        + "}\n"
    )


def text_of_encoders() -> str:
    """The whole file of the encoders, with the classes of the parts of a model."""
    kinds = [one for kind, family in ENCODERS.items() for one in (kind, *family.parts.values())]
    return (
        HEAD_OF_FAMILIES.format(these="the encoders")
        + "".join(_entry(kind, *described(kind)) for kind in kinds)
        + "}\n"
    )


def _entry(
    kind: str, called: str, defaults: dict[str, Any], nullable: list[str], aliases: dict[str, str], beside: list[str]
) -> str:
    parts = [
        f"{called!r},",
        f"{defaults!r},",
        f"frozenset({nullable!r}),",
        f"{aliases!r},",
        f"frozenset({beside!r}),",
    ]
    wrapped = [
        textwrap.fill(part, 118, initial_indent=" " * 8, subsequent_indent=" " * 9, break_long_words=False)
        for part in parts
    ]
    return "\n".join([f"    {kind!r}: ConfigClass(", *wrapped, "    ),", ""]).replace("'", '"')


if __name__ == "__main__":
    PATH.write_text(text())
    OF_FAMILIES.write_text(text_of_families())
    OF_ENCODERS.write_text(text_of_encoders())
