"""What a config takes from the source that `init` names, where it does not say it itself."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from meshpar.checkpoint.saved import find
from meshpar.data import Chat, Preferences, Prompts
from meshpar.errors import CheckpointError
from meshpar.interop.folder import MODEL_FILES

SIZES = {"num_layers", "hidden_size", "num_heads", "intermediate_size"}
"""Keys that a `model` of meshpar's needs; where one is missing, `init` may name a model that has them."""
CONVERSATIONS = {one.model_fields["kind"].default for one in (Chat, Preferences, Prompts)}
TOKENIZER = "tokenizer.json"


def with_model(data: dict[str, Any], init: dict[str, Any]) -> dict[str, Any]:
    """The data of a run with the keys of `model` that are missing, if any size is.

    Raises:
      CheckpointError: the source is not there, and there is no checkpoint in `run_dir`.
    """
    model = data.get("model") or {}
    if not isinstance(model, dict) or not SIZES - model.keys():
        return data
    if "config" in model or model.get("kind") not in (None, "llama", "gpt", "family", "encoder"):
        return data  # that of a family is complete
    found = _model_in(init, data.get("run_dir"))
    kind = found.get("kind")
    if kind is None or model.get("kind", kind) != kind:
        return data
    return data | {"model": found | model}


def with_tokenizer(data: dict[str, Any], init: dict[str, Any]) -> dict[str, Any]:
    """The data of a run with the tokenizer of conversations that name none: that of the model they are for."""
    if not _lacks_tokenizer(data.get("data")) or (path := _tokenizer_in(init, data.get("run_dir"))) is None:
        return data
    return data | {"data": _with(data["data"], str(path))}


def _model_in(init: dict[str, Any], run_dir: Any) -> dict[str, Any]:
    """The `model` of the folder or of the checkpoint that `init` names; empty if it names none.

    Raises:
      CheckpointError: it is not there, and there is no checkpoint in `run_dir`: a run that resumes needs no source.
    """
    folder, checkpoint = init.get("from_hf"), init.get("from_checkpoint")
    try:
        if isinstance(folder, (str, Path)):
            from meshpar.interop.open_folder import open_folder

            return open_folder(Path(folder)).model.model_dump(mode="json")
        return _model_of(checkpoint) if isinstance(checkpoint, (str, Path)) else {}
    except CheckpointError:
        if isinstance(run_dir, (str, Path)):
            with suppress(CheckpointError):
                return _model_of(run_dir)
        raise


def _model_of(checkpoint: str | Path) -> dict[str, Any]:
    config = find(Path(checkpoint), include=()).meta.get("config")
    found = config.get("model") if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def _lacks_tokenizer(data: Any) -> bool:
    """Whether data, or a part of a mixture, are conversations without a tokenizer."""
    if not isinstance(data, dict):
        return False
    if data.get("kind") == "mixture" and isinstance(data.get("parts"), (list, tuple)):
        return any(_lacks_tokenizer(part.get("data")) for part in data["parts"] if isinstance(part, dict))
    return data.get("kind") in CONVERSATIONS and data.get("tokenizer") is None


def _with(data: dict[str, Any], path: str) -> dict[str, Any]:
    if data["kind"] != "mixture":
        return data | {"tokenizer": path}
    lacks = [isinstance(part, dict) and _lacks_tokenizer(part.get("data")) for part in data["parts"]]
    parts = zip(data["parts"], lacks, strict=True)
    return data | {"parts": [part | {"data": _with(part["data"], path)} if lack else part for part, lack in parts]}


def _tokenizer_in(init: dict[str, Any], run_dir: Any) -> Path | None:
    """The tokenizer of the model that `init` names; of a run that resumes without it, that in its own directory."""
    folder, checkpoint = init.get("from_hf"), init.get("from_checkpoint")
    found: list[Path] = []
    with suppress(CheckpointError):
        if isinstance(folder, (str, Path)):
            from meshpar.interop.peft import files_of

            found.append(files_of(Path(folder)))
        elif isinstance(checkpoint, (str, Path)):
            found.append(find(Path(checkpoint), include=()).folder.parents[1] / MODEL_FILES)
    if isinstance(run_dir, (str, Path)):
        found.append(Path(run_dir) / MODEL_FILES)
    return next((one / TOKENIZER for one in found if (one / TOKENIZER).is_file()), None)
