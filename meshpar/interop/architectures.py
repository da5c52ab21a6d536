"""Converts the `config.json` of a Hugging Face model to a model of meshpar, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pydantic

from meshpar.errors import Problems, excerpt, nearest
from meshpar.models import KINDS
from meshpar.models.config_classes import CONFIG_CLASSES, ConfigClass
from meshpar.models.decoder import DecoderModel
from meshpar.models.foreign import LARGEST, NEUTRAL, OUTSIDE, REQUIRED, WITHOUT_EFFECT, Architecture, Json
from meshpar.nn.decoder import TRAINING_FIELDS

MODELS: dict[str, type[DecoderModel]] = {
    model_type: kind  # pyright: ignore[reportAssignmentType]  only decoders have architectures
    for kind in KINDS
    for model_type in kind.architectures()
}
"""`model_type` -> the kind of model that computes it. Exports write the first of several that compute the same."""
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of `config.json` that belong to the tokenizer."""
ARCHITECTURES = {model_type: kind.architectures()[model_type] for model_type, kind in MODELS.items()}


def read(config: Json, where: str, problems: Problems, most_layers: int = LARGEST) -> DecoderModel | None:
    """Returns the model that a `config.json` describes; None if it is not supported, with the reasons in `problems`.

    Args:
      where: the file's name in the problems.
      most_layers: an upper bound on the number of layers: 1e9 layers are refused before their tensors are listed.
    """
    kind = kind_of(config)
    found = Problems()
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        near = nearest(str(kind), ARCHITECTURES)
        fix = f"supported: {', '.join(ARCHITECTURES)}" + (f"; did you mean {near}?" if near else "")
        problems.add(f"{where}: model_type", f"{kind!r} is not supported", fix)
        return None
    architecture = ARCHITECTURES[kind]
    given = completed(config, CONFIG_CLASSES[kind], found)
    sizes = {field: given[key] for key, field in architecture.keys.items() if given.get(key) is not None}
    num_found = len(found)
    _check_sizes(sizes, architecture, most_layers, found)
    extra = _extra(architecture, given, found) if len(found) == num_found else {}
    model = None
    try:
        model = pydantic.TypeAdapter(MODELS[kind]).validate_json(json.dumps(extra | sizes), strict=True)
    except pydantic.ValidationError as invalid:
        _report(invalid, {field: key for key, field in architecture.keys.items()}, found)
    if model is not None:
        check_layer_types(config, CONFIG_CLASSES[kind], model.window, model.num_layers, found)
    problems.extend(found, f"{where}: ")
    return None if found else model


def check_layer_types(config: Json, own: ConfigClass, window: int | None, num: int, found: Problems) -> None:
    """Reports types of layers of a class that has none: all of its layers have one window, or none."""
    types = config.get("layer_types")
    computed = "full_attention" if window is None else "sliding_attention"
    if "layer_types" in own.defaults or types is None or types == [computed] * num:
        return
    what = f"is {excerpt(repr(types))}, and {own.called} computes {computed} in every layer"
    found.add("layer_types", what, "leave it out, to compute what transformers does")


def kind_of(config: Json) -> Any:
    """The kind of model that transformers makes of a `config.json`: Mistral with `layer_types` is Ministral."""
    kind = config.get("model_type")
    return "ministral" if kind == "mistral" and "layer_types" in config else kind


def completed(config: Json, own: ConfigClass, found: Problems) -> Json:
    """The values that a config class of transformers has after it read a `config.json`.

    Other names of a key are replaced by its own name, and a missing key has the default of the class. Keys that the
    class does not have are left out, as transformers does, and refused if they might ask for another model.
    """
    defaults = own.defaults
    called = {alias: key for alias, key in own.aliases.items() if key in defaults}
    called |= {key: alias for alias, key in own.aliases.items() if key not in defaults}
    given: Json = {}
    for key, value in config.items():
        name = called.get(key, key)
        if name not in defaults and name not in own.beside:
            _check_unknown(name, value, own, found)
            continue
        if name in given and given[name] != value:
            found.add(key, f"is {excerpt(repr(value))}, and {name}, the same setting, is {excerpt(repr(given[name]))}")
        if value is None and name in defaults and name not in own.nullable and name not in WITHOUT_EFFECT:
            found.add(key, f"is null, which {own.called} does not allow", f"{key}: {json.dumps(defaults[name])}")
        given[name] = value
    for key, value in REQUIRED.items():
        if given.get(key) is not None and given[key] != value:
            what = f"is {excerpt(repr(given[key]))}, and only {json.dumps(value)} is supported"
            fix = "download the checkpoint in bfloat16" if key == "quantization_config" else ""
            found.add(key, what, fix)
    return {**defaults, **given}


def _asks(key: str, value: Any, own: ConfigClass) -> bool:
    """Whether a key that the class does not have asks for a model that the class does not compute."""
    neutral = REQUIRED | NEUTRAL
    is_neutral = value is None or (key in neutral and value == neutral[key])
    # Such a class computes its window anyway.
    is_neutral |= key == "use_sliding_window" and value is True and "sliding_window" in own.defaults
    # `check_layer_types` compares layer_types with the layers.
    return not (is_neutral or key.startswith("_") or key in OUTSIDE | WITHOUT_EFFECT | {"layer_types"})


def _check_unknown(key: str, value: Any, own: ConfigClass, found: Problems) -> None:
    """Reports a key that the class does not have: whoever wrote it expected an effect.

    It is a typing error, or the file of another model that only looks like one of this class.
    """
    if not _asks(key, value, own):
        return
    near = nearest(key, own.defaults)
    fix = "leave it out, to compute what transformers does" + (f"; did you mean {near}?" if near else "")
    found.add(key, f"is {excerpt(repr(value))}, and {own.called} has no such key", fix)


def _check_sizes(sizes: Json, architecture: Architecture, most_layers: int, found: Problems) -> None:
    """Reports sizes that would overflow, or take very long to compute with."""
    for key, field in architecture.keys.items():
        value = sizes.get(field)
        if isinstance(value, float) and not math.isfinite(value):
            found.add(key, f"{value} is not finite")
        elif isinstance(value, (int, float)) and value > LARGEST:
            found.add(key, f"is larger than {LARGEST}")
        elif isinstance(value, int) and field == "num_layers" and value > most_layers:
            found.add(key, f"is {value}, but there are tensors for at most {most_layers} layers")


def _extra(architecture: Architecture, given: Json, found: Problems) -> Json:
    """Reads the fields of our model that are not sizes."""
    try:
        read = architecture.given.model_validate(given)
    except pydantic.ValidationError as invalid:
        _report(invalid, {}, found)
        return {}
    return architecture.read(read, found)


def _report(invalid: pydantic.ValidationError, keys: Mapping[str, str], found: Problems) -> None:
    """Adds pydantic's errors under the keys of the file. Keys that have a problem already are skipped."""
    known = {problem.where for problem in found.found}
    for error in invalid.errors(include_url=False):
        name = ".".join(map(str, error["loc"])) or "sizes"
        key = keys.get(name, name)
        if key not in known:
            is_missing = error["type"] == "missing"
            what = "required, but missing" if is_missing else f"{error['msg']}, got {excerpt(repr(error['input']))}"
            found.add(key, what)


def write(model: DecoderModel, original: Json | None = None) -> Json | None:
    """Returns a `config.json` for a model; None if no architecture computes the same.

    Args:
      original: the config that the model may have been read from. If it still describes the model, it is returned;
        otherwise its special ids are kept.
    """
    ids = {key: value for key, value in (original or {}).items() if key in IDS}
    for config in [original or {}, *(_written(model, kind) | ids for kind in model.architectures())]:
        described = read(config, "", Problems(), model.num_layers)
        if described is not None and canonical(described) == canonical(model):
            return config
    return None


def _written(model: DecoderModel, kind: str) -> Json:
    architecture = ARCHITECTURES[kind]
    plain = canonical(model)
    sizes = {key: getattr(plain, field) for key, field in architecture.keys.items()}
    config = {"model_type": kind, "architectures": [architecture.called]} | sizes | architecture.write(plain)
    own = CONFIG_CLASSES[kind_of(config)]
    known = {"model_type", *own.defaults, *own.aliases, *own.aliases.values(), *own.beside}
    return {key: value for key, value in config.items() if key in known or not _asks(key, value, own)}


def canonical(model: DecoderModel) -> DecoderModel:
    """The model with its defaults made explicit, and with the fields that matter only for training reset."""
    sizes = {"num_kv_heads": model.kv_heads, "head_dim": model.head_size}
    defaults = {name: type(model).model_fields[name].default for name in TRAINING_FIELDS}
    experts = {"experts": model.experts.without_training()} if model.experts else {}
    return model.model_copy(update=sizes | defaults | experts)
