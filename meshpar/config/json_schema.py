"""Describes config files, shorthands included, as a JSON schema for editors."""

from __future__ import annotations

from typing import Any

from meshpar.config.annotations import field_docs, is_path, kind_of, reachable
from meshpar.config.model import Config, without_fields

_E_NOTATION = r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"
"""`1e-3` is a string in YAML 1.1, which some editors use, and a number here."""
RELATIVE = "Relative to the working directory."
"""What is said of each path."""


def schema(root: type[Config]) -> dict[str, Any]:
    """The JSON schema of a file for `root`; each field is described by the docstring below it.

    A file that extends another may omit any key, so keys are required only at the root of a file without `extends`.
    """
    described = root.model_json_schema()
    required = described.pop("required", [])
    models: dict[str, Any] = {model.__name__: model for model in reachable(root)}
    definitions = described.pop("$defs", {})
    for name, definition in [*definitions.items(), (root.__name__, described)]:
        definition.pop("required", None)
        if "description" in definition:
            definition["description"] = without_fields(definition["description"])
        for field, text in field_docs(models[name]).items():
            is_relative = is_path(models[name].model_fields[field]) and RELATIVE not in text
            definition["properties"][field]["description"] = f"{text} {RELATIVE}" if is_relative else text
    inherited = {"type": "string", "description": "A file that supplies the keys which this one leaves out."}
    described["properties"]["extends"] = inherited
    supplied = [[by if key == other else key for key in required] for other, by in root.supplied.items()]
    described["anyOf"] = [{"required": keys} for keys in (["extends"], required, *supplied)]
    written = {name: _as_written(definition, models[name]) for name, definition in definitions.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_lenient(described),
        "$defs": _lenient(written),
    }


def _as_written(definition: dict[str, Any], model: type[Config]) -> dict[str, Any]:
    """Allows a model's mapping, or the bare value that stands for it."""
    if model.shorthand is None:
        return definition
    about = definition["properties"][model.shorthand]
    bare = {key: value for key, value in about.items() if key not in ("default", "description", "title")}
    if bare.get("type") == "array":  # a single glob or preset
        bare = {"anyOf": [bare, bare["items"]]}
        definition["properties"][model.shorthand] = bare | {"description": about["description"]}
    return {"anyOf": [definition, bare if model.shorthand != "kind" else {"const": kind_of(model)}]}


def _lenient(described: Any) -> Any:
    """Allows numbers as YAML 1.1 reads them, a kind alone, and a section without `kind`, which an extended file may
    supply."""
    if isinstance(described, list):
        return [_lenient(item) for item in described]
    if not isinstance(described, dict):
        return described
    lenient = {key: _lenient(value) for key, value in described.items()}
    if "discriminator" in lenient:
        kinds = list(lenient.pop("discriminator")["mapping"])
        lenient["anyOf"] = [*lenient.pop("oneOf"), {"enum": kinds}]
    if lenient.get("type") == "number":
        about = {key: lenient.pop(key) for key in ("default", "description", "title") if key in lenient}
        return {"anyOf": [lenient, {"type": "string", "pattern": _E_NOTATION}], **about}
    return lenient
