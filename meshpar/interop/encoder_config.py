"""Reads the `config.json` of an encoder: each key acts, or is refused, or is known to change nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshpar.errors import Problems, excerpt
from meshpar.interop import architectures
from meshpar.interop.family_config import check_unread
from meshpar.models.config_classes import CONFIG_CLASSES, ConfigClass
from meshpar.models.encoders import ENCODERS
from meshpar.models.encoders.family import EncoderFamily, HeadName, Options, Wanted
from meshpar.models.families.keys import Keys
from meshpar.models.foreign import Json

MOST_CLASSES = 2**20
AGAIN = "_dict"
"""The end of the second name of a part, which older files have beside the first."""


@dataclass(frozen=True)
class Described:
    """What a `config.json` says of its model besides its sizes: the head of its class, and the number of classes."""

    head: HeadName
    num: int


def encoder_family(config: Json) -> EncoderFamily | None:
    kind = config.get("model_type")
    return ENCODERS.get(kind) if isinstance(kind, str) else None


def described(config: Json, family: EncoderFamily) -> Described:
    """The head by the name of the class that wrote the file; the class without a head by default."""
    written = config.get("architectures")
    names = written if isinstance(written, list) else []
    base: HeadName = "hidden" if "hidden" in family.classes else next(iter(family.classes))
    by_class = {called: head for head, called in family.classes.items()} | dict(family.like)
    heads = [head for called, head in by_class.items() if called in names]
    labels = config.get("id2label")
    num = config.get("num_labels", len(labels) if isinstance(labels, dict) and labels else 2)
    is_size = isinstance(num, int) and not isinstance(num, bool) and 0 < num <= MOST_CLASSES
    return Described(heads[0] if heads else base, num if is_size else 2)  # pyright: ignore[reportArgumentType]


def encoder_options(config: Json, wanted: Wanted, where: str, problems: Problems) -> Options | None:
    """The encoder that a `config.json` describes; None if it is refused, with the reasons in `problems`.

    Args:
      wanted: the head that it gets.
      where: the file's name in the problems.
    """
    family = encoder_family(config)
    assert family is not None
    found = Problems()
    own = CONFIG_CLASSES[config["model_type"]]
    of_parts = {name + end for name in family.parts for end in ("", AGAIN)}
    keys = {"": _keys(_without(config, of_parts | {"id2label", "label2id"}), own, family, found)}
    inner = {name: Problems() for name in family.parts}
    for name, kind in family.parts.items():
        called = CONFIG_CLASSES[kind]
        keys[name] = _keys(_part(config, name, called, found), called, family, inner[name])
    options = family.read(keys if family.parts else keys[""], wanted)
    for name, one in keys.items():
        one.read |= family.without_effect | {*family.parts}
        check_unread(one, CONFIG_CLASSES[family.parts[name]] if name else own)
    problems.extend(found, f"{where}: ")
    for name, of_part in inner.items():
        problems.extend(of_part, f"{where}: {name}.")
    return options if not found and not any(inner.values()) else None


def _without(config: Json, names: set[str]) -> Json:
    return {name: value for name, value in config.items() if name not in names}


def _part(config: Json, name: str, own: ConfigClass, found: Problems) -> Json:
    """The config of a tower; empty if there is none, as in transformers.

    Of the second name the values count, and so do the defaults of its class, as in transformers.
    """
    parts = {key: config.get(key) or {} for key in (name, name + AGAIN)}
    for key, part in parts.items():
        if not isinstance(part, dict):
            found.add(key, f"is {excerpt(repr(part))}, not a mapping of keys")
            return {}
    first, second = parts.values()
    if config.get(name + AGAIN) is not None:
        first = _without(first, {*own.defaults})
    return _without(first | second, {"projection_dim"})  # that of the whole model counts


def _keys(config: Json, own: ConfigClass, family: EncoderFamily, found: Problems) -> Keys:
    given: dict[str, Any] = {}
    for name, value in config.items():
        neutral = name in family.neutral and name not in own.defaults
        if neutral and family.neutral[name] in (None, value):
            continue
        given[name] = value
    return Keys(architectures.completed(given, own, found), found)


def check_head(config: Json, family: EncoderFamily, where: str, problems: Problems) -> None:
    """Reports a class whose head is not read, and a number of classes that is none."""
    written = config.get("architectures") or []
    known = {*family.classes.values(), *family.like}
    if isinstance(written, list) and written and not known & {str(one) for one in written}:
        heads = ", ".join(one for one in family.classes if one != "hidden")
        what = f"is {excerpt(repr(written))}, whose head is not read"
        problems.add(f"{where}: architectures", what, f"model.head: one of {heads}, which begins at random")
    num = config.get("num_labels")
    if num is not None and (not isinstance(num, int) or isinstance(num, bool) or not 0 < num <= MOST_CLASSES):
        problems.add(f"{where}: num_labels", f"is {excerpt(repr(num))}, not a number of classes")
