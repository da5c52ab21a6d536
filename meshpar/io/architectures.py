"""`config.json` of Hugging Face's models to a model of meshpar, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import pydantic

from meshpar.errors import Problems, nearest
from meshpar.models import KINDS
from meshpar.models.decoder import DecoderModel
from meshpar.models.foreign import LARGEST, Architecture, Json, shortened

MODELS: dict[str, type[DecoderModel]] = {
    model_type: kind  # pyright: ignore[reportAssignmentType]  only decoders have architectures
    for kind in KINDS
    for model_type in kind.architectures()
}
"""`model_type` -> the kind of model that computes it; of several that compute the same, the first is written."""
ARCHITECTURES = {model_type: kind.architectures()[model_type] for model_type, kind in MODELS.items()}


def read(config: Json, where: str, problems: Problems, most_layers: int = LARGEST) -> DecoderModel | None:
    """The model that a `config.json` describes; None, and why, if there is none.

    Args:
      where: what the problems call it.
      most_layers: that there can be: a file that says 1e9 is refused before each is named.
    """
    kind, found = config.get("model_type"), Problems()
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        near = nearest(str(kind), ARCHITECTURES)
        meant = f"did you mean {near}? " if near else ""
        problems.add(
            f"{where}: model_type", f"no model is called {kind!r}", f"{meant}There are {', '.join(ARCHITECTURES)}"
        )
        return None
    architecture = ARCHITECTURES[kind]
    given = {key: value for key, value in config.items() if value is not None}
    sizes = {field: given[key] for key, field in architecture.keys.items() if key in given}
    _check_sizes(sizes, architecture, most_layers, found)
    extra = _extra(architecture, given, found) if not found else {}
    model = None
    try:
        model = MODELS[kind].model_validate_json(json.dumps(extra | sizes), strict=True)
    except pydantic.ValidationError as invalid:
        keys = {field: key for key, field in architecture.keys.items()}
        _tell(invalid, keys, found)
    for problem in found.found:
        problems.add(f"{where}: {problem.where}", problem.what, problem.fix)
    return None if found else model


def _check_sizes(sizes: Json, architecture: Architecture, most_layers: int, found: Problems) -> None:
    """What would be computed with for a long time, or overflow."""
    for key, field in architecture.keys.items():
        value = sizes.get(field)
        if isinstance(value, float) and not math.isfinite(value):
            found.add(key, f"{value} is no number to compute with")
        elif isinstance(value, (int, float)) and value > LARGEST:
            found.add(key, f"is beyond {LARGEST}")
        elif isinstance(value, int) and field == "num_layers" and value > most_layers:
            found.add(key, f"is {value}, and the tensors are enough for {most_layers} layers at most")


def _extra(architecture: Architecture, given: Json, found: Problems) -> Json:
    """What follows from the config beside the sizes."""
    try:
        read = architecture.given.model_validate(given)
    except pydantic.ValidationError as invalid:
        _tell(invalid, {}, found)
        return {}
    if read.quantization_config:
        found.add("quantization_config", "quantized checkpoints are not read", "fetch the one in bfloat16")
    return architecture.read(read, found)


def _tell(invalid: pydantic.ValidationError, keys: Mapping[str, str], found: Problems) -> None:
    """Adds what pydantic found, under the keys of the file; of what is a problem already, no second one."""
    known = {problem.where for problem in found.found}
    for error in invalid.errors(include_url=False):
        name = ".".join(map(str, error["loc"])) or "sizes"
        key = keys.get(name, name)
        if key not in known:
            missing = error["type"] == "missing"
            found.add(key, "required, but missing" if missing else f"{error['msg']}, got {shortened(error['input'])}")


def write(model: DecoderModel, original: Json | None = None) -> Json | None:
    """A `config.json` for a model; None if no architecture computes what it does.

    Args:
      original: a config from which it may have come: if it fits, it stays.
    """
    candidates = [original or {}, *(_written(model, kind) for kind in model.architectures())]
    same = (config for config in candidates if _same(read(config, "", Problems(), model.num_layers), model))
    return next(same, None)


def _written(model: DecoderModel, kind: str) -> Json:
    architecture = ARCHITECTURES[kind]
    plain = canonical(model)
    sizes = {key: getattr(plain, field) for key, field in architecture.keys.items()}
    return {"model_type": kind, "architectures": [architecture.called]} | sizes | architecture.write(plain)


def canonical(model: DecoderModel) -> DecoderModel:
    """The model with its defaults written out, without what is of its training only."""
    sizes = {"num_kv_heads": model.kv_heads, "head_dim": model.head_size}
    return model.model_copy(update=sizes | {"vocab_multiple": 1, "layers_multiple": 1, "dropout": 0.0, "remat": "none"})


def _same(a: DecoderModel | None, b: DecoderModel) -> bool:
    return a is not None and canonical(a) == canonical(b)
