"""Converts the `config.json` of a Hugging Face model to a model of meshpar, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import pydantic

from meshpar.errors import Problems, excerpt, nearest
from meshpar.models import KINDS
from meshpar.models.decoder import DecoderModel
from meshpar.models.foreign import LARGEST, Architecture, Json
from meshpar.nn.transformer import TRAINING_FIELDS

MODELS: dict[str, type[DecoderModel]] = {
    model_type: kind  # pyright: ignore[reportAssignmentType]  only decoders have architectures
    for kind in KINDS
    for model_type in kind.architectures()
}
"""`model_type` -> the kind of model that computes it. Exports write the first of several that compute the same."""
ARCHITECTURES = {model_type: kind.architectures()[model_type] for model_type, kind in MODELS.items()}


def read(config: Json, where: str, problems: Problems, most_layers: int = LARGEST) -> DecoderModel | None:
    """Returns the model that a `config.json` describes; None if it is not supported, with the reasons in `problems`.

    Args:
      where: the file's name in the problems.
      most_layers: an upper bound on the number of layers: 1e9 layers are refused before their tensors are listed.
    """
    kind = config.get("model_type")
    found = Problems()
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        near = nearest(str(kind), ARCHITECTURES)
        fix = f"supported: {', '.join(ARCHITECTURES)}" + (f"; did you mean {near}?" if near else "")
        problems.add(f"{where}: model_type", f"{kind!r} is not supported", fix)
        return None
    architecture = ARCHITECTURES[kind]
    given = {key: value for key, value in config.items() if value is not None}
    sizes = {field: given[key] for key, field in architecture.keys.items() if key in given}
    _check_sizes(sizes, architecture, most_layers, found)
    extra = _extra(architecture, given, found) if not found else {}
    model = None
    try:
        model = pydantic.TypeAdapter(MODELS[kind]).validate_json(json.dumps(extra | sizes), strict=True)
    except pydantic.ValidationError as invalid:
        _report(invalid, {field: key for key, field in architecture.keys.items()}, found)
    for problem in found.found:
        problems.add(f"{where}: {problem.where}", problem.what, problem.fix)
    return None if found else model


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
    if read.quantization_config:
        found.add("quantization_config", "quantized checkpoints are not supported", "download the one in bfloat16")
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
      original: the config that the model may have been read from. If it still describes the model, it is returned.
    """
    for config in [original or {}, *(_written(model, kind) for kind in model.architectures())]:
        described = read(config, "", Problems(), model.num_layers)
        if described is not None and canonical(described) == canonical(model):
            return config
    return None


def _written(model: DecoderModel, kind: str) -> Json:
    architecture = ARCHITECTURES[kind]
    plain = canonical(model)
    sizes = {key: getattr(plain, field) for key, field in architecture.keys.items()}
    return {"model_type": kind, "architectures": [architecture.called]} | sizes | architecture.write(plain)


def canonical(model: DecoderModel) -> DecoderModel:
    """The model with its defaults made explicit, and with the fields that matter only for training reset."""
    sizes = {"num_kv_heads": model.kv_heads, "head_dim": model.head_size}
    defaults = {name: type(model).model_fields[name].default for name in TRAINING_FIELDS}
    experts = {"experts": model.experts.without_training()} if model.experts else {}
    return model.model_copy(update=sizes | defaults | experts)
