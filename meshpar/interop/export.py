"""Writes a model as a folder that Hugging Face's libraries read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import jax
import numpy as np

from meshpar.checkpoint.durable import sync, sync_tree
from meshpar.errors import CheckpointError, Problems
from meshpar.interop import architectures
from meshpar.interop.family_model import FamilyModel
from meshpar.interop.folder import CONFIG, INDEX, MODEL_FILES, SOURCE, WEIGHTS, check_inside, read_json
from meshpar.interop.layout import Layout, decoder_layout
from meshpar.interop.safetensors import Written, write
from meshpar.models.decoder import DecoderModel
from meshpar.regular_files import open_regular

LARGEST_FILE = 5 * 10**9
"""Bytes of tensors per file, if there are several tensors."""
COMPANIONS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
              "preprocessor_config.json", "processor_config.json",
              "chat_template*", "generation_config.json")  # fmt: skip
"""Globs of the files that are copied with a model, byte for byte."""


def export(
    folder: Path,
    model: DecoderModel | FamilyModel,
    params: Mapping[str, jax.Array],
    companions: Path | None = None,
    largest_file: int = LARGEST_FILE,
) -> None:
    """Writes `config.json` and the parameters, in their own dtype.

    Args:
      folder: a new folder, which is created completely or not at all.
      params: by path.
      companions: a folder with the `config.json` that the model was read from, and its tokenizer's files.

    Memory: the parameters, and a copy of one tensor.

    Raises:
      CheckpointError: the folder exists; or no supported architecture describes the model.
    """
    config, layout = exported(model, companions)
    dtype = np.dtype(next(iter(params.values())).dtype)
    config = config | {"dtype" if "dtype" in config else "torch_dtype": dtype.name}
    tensors = list(layout.written(params, dtype))
    with whole_or_not(folder) as made:
        (made / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        copy_companions(companions, made)
        _write_files(made, tensors, largest_file)


@contextmanager
def whole_or_not(folder: Path) -> Iterator[Path]:
    """A temporary folder to write into, synced and renamed to `folder` unless an error is raised.

    Raises:
      CheckpointError: `folder` exists, and nothing is overwritten; or it cannot be written.
    """
    check_free(folder)
    made = folder.with_name(f".{folder.name}.{uuid4().hex}")
    try:
        made.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror}") from None
    try:
        yield made
        check_free(folder)
        sync_tree(made)
        made.rename(folder)
        sync(folder.parent)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def check_free(folder: Path) -> None:
    """Raises CheckpointError if the folder exists."""
    if os.path.lexists(folder):
        raise CheckpointError(f"{folder} exists, and nothing is overwritten: choose another name, or remove it")


def keep_model_files(source: Path, run_dir: Path) -> None:
    """Copies the `config.json`, the tokenizer and the templates of a model into a run directory, if it has none yet."""
    kept = run_dir / MODEL_FILES
    if kept.exists() or not (source / CONFIG).is_file():
        return
    with whole_or_not(kept) as made:
        copy_companions(source, made, (CONFIG, SOURCE, *COMPANIONS))


def copy_companions(source: Path | None, to: Path, patterns: Sequence[str] = COMPANIONS) -> None:
    """Copies the tokenizer's files, if there are any.

    Raises:
      CheckpointError: lists the links that lead out of the folder, and the files that are not regular files.
    """
    problems = Problems()
    paths = {path for pattern in patterns for path in source.glob(pattern)} if source else set()
    for path in sorted(paths):
        if path.is_dir():
            continue
        try:
            check_inside(path.parent, path.name)
            with open_regular(path) as file, (to / path.name).open("xb") as copy:
                shutil.copyfileobj(file, copy)
        except OSError as error:
            problems.add(str(path), f"cannot be copied: {error.strerror}", "put a copy of the file there, or remove it")
    problems.raise_any(CheckpointError, f"the tokenizer of {source} cannot be copied:")


def exported(model: DecoderModel | FamilyModel, companions: Path | None) -> tuple[dict[str, Any], Layout]:
    """The `config.json` of a model, and the tensors that it describes.

    Args:
      companions: see `export`.

    Raises:
      CheckpointError: no supported architecture describes the model.
    """
    problems = Problems()
    read = read_json(companions, CONFIG, problems) if companions and (companions / CONFIG).exists() else None
    problems.raise_any(CheckpointError, f"{companions} cannot be read:")
    if isinstance(model, FamilyModel):
        return model.exported(read)
    config = architectures.write(model, read)
    if config is None:
        known = ", ".join(architectures.ARCHITECTURES)
        raise CheckpointError(f"none of the supported architectures computes what this model does: {known}")
    return config, decoder_layout(model, config["model_type"])


def _write_files(folder: Path, tensors: list[Written], largest_file: int) -> None:
    files = _files(tensors, largest_file)
    if len(files) == 1:
        write(folder / WEIGHTS, files[0])
        return
    where: dict[str, str] = {}
    for number, file in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        write(folder / name, file)
        where |= {tensor.name: name for tensor in file}
    index = {"metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _files(tensors: list[Written], largest_file: int) -> list[list[Written]]:
    """The tensors of each file, in order: as many as fit, and at least one."""
    files: list[list[Written]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(other.num_bytes for other in files[-1]) + tensor.num_bytes > largest_file:
            files.append([])
        files[-1].append(tensor)
    return files
