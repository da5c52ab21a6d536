"""Writes the updates of LoRA as an adapter of the library PEFT; see `peft`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshpar.errors import CheckpointError
from meshpar.interop.export import config_of, copy_companions, whole_or_not
from meshpar.interop.huggingface import layer_shapes, names_of, numbered
from meshpar.interop.peft import ADAPTER, ADAPTER_CONFIG, PREFIX
from meshpar.interop.safetensors import Written, write
from meshpar.models.decoder import DecoderModel
from meshpar.models.foreign import EXPERT, Foreign, Shape
from meshpar.nn.lora import LoRA

Place = tuple[int, ...]


def write_adapter(
    folder: Path, model: DecoderModel, lora: LoRA, params: Mapping[str, jax.Array], base: str, companions: Path | None
) -> None:
    """Writes a new folder, completely or not at all.

    Parts of a matrix that Hugging Face stores as one, such as q, k and v of GPT-2, have updates of their own here. They
    are written as one update, whose rank is the sum of theirs.

    Args:
      params: by path, with those of LoRA.
      base: what `base_model_name_or_path` says.
      companions: see `export`.

    Raises:
      CheckpointError: the folder exists; or what is adapted has no form in PEFT.
    """
    shapes = layer_shapes(model)
    found = _adapted(model, config_of(model, companions)["model_type"], params)
    if experts := [name for name, _ in found if EXPERT in name]:
        raise CheckpointError(f"{experts[0]}: updates of experts are not written; export with --format hf")
    if len({foreign.outputs_first for _, foreign in found}) != 1:
        raise CheckpointError("some adapted matrices are [in, out] and others [out, in]; export with --format hf")
    modules: dict[str, int] = {}
    tensors: list[Written] = []
    for name, foreign in found:
        rank = lora.rank * len(_projections(foreign, params))
        for place, complete in numbered(name, foreign, model):
            module = complete.removesuffix(".weight")
            modules[module] = rank
            tensors += _written(module, foreign, shapes, params, place, rank)
    with whole_or_not(folder) as made:
        config = _config(lora, modules, base, found[0][1])
        (made / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        copy_companions(companions, made)
        write(made / ADAPTER, tensors)


def _adapted(model: DecoderModel, kind: str, params: Mapping[str, Any]) -> list[tuple[str, Foreign]]:
    return [(name, foreign) for name, foreign in names_of(model, kind) if _projections(foreign, params)]


def _projections(foreign: Foreign, params: Mapping[str, Any]) -> list[str]:
    """The parts of a matrix that have an update."""
    return [path for path in foreign.parts if path.endswith(".kernel") and f"{_lora(path)}.a" in params]


def _lora(path: str) -> str:
    return f"{path.removesuffix('.kernel')}.lora"


def _config(lora: LoRA, modules: Mapping[str, int], base: str, foreign: Foreign) -> dict[str, Any]:
    """With the same scale alpha / rank for updates of any rank."""
    others = {module: rank for module, rank in modules.items() if rank != lora.rank}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": lora.rank, "lora_alpha": lora.alpha, "rank_pattern": others,
        "alpha_pattern": {module: lora.scale * rank for module, rank in others.items()},
        "target_modules": list(modules), "fan_in_fan_out": not foreign.outputs_first, "bias": "none",
        "lora_dropout": 0.0, "use_rslora": False, "use_dora": False, "init_lora_weights": True, "modules_to_save": None,
    }  # fmt: skip


def _written(
    module: str, foreign: Foreign, shapes: Mapping[str, Shape], params: Mapping[str, jax.Array], place: Place, rank: int
) -> Iterator[Written]:
    first, *others = foreign.parts
    size_in = math.prod(shapes[first][: foreign.inputs])
    size_out = sum(math.prod(shapes[part][foreign.inputs :]) for part in (first, *others))
    dtype = np.dtype(params[f"{_lora(_projections(foreign, params)[0])}.a"].dtype)
    make = partial(_matrices, foreign, shapes, params, place)
    yield Written(f"{PREFIX}{module}.lora_A.weight", dtype, (rank, size_in), lambda: make()[0])
    yield Written(f"{PREFIX}{module}.lora_B.weight", dtype, (size_out, rank), lambda: make()[1])


def _matrices(
    foreign: Foreign, shapes: Mapping[str, Shape], params: Mapping[str, jax.Array], place: Place
) -> tuple[np.ndarray, np.ndarray]:
    """A [rank, in] and B [out, rank] of one layer; B has a block for each part."""
    lefts: list[np.ndarray] = []
    rights: list[np.ndarray] = []
    adapted = _projections(foreign, params)
    for path in foreign.parts:
        shape_in, shape_out = shapes[path][: foreign.inputs], shapes[path][foreign.inputs :]
        if path not in adapted:
            lefts.append(np.zeros((math.prod(shape_out), 0)))
            continue
        a, b = (np.asarray(jax.device_get(params[f"{_lora(path)}.{one}"][place])) for one in "ab")
        rights.append(a[_without_padding(shape_in)].reshape(-1, a.shape[-1]).T)
        lefts.append(b[(slice(None), *_without_padding(shape_out))].reshape(b.shape[0], -1).T)
    return np.concatenate(rights), _blocks(lefts, rights[0].dtype)


def _without_padding(shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def _blocks(matrices: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """The matrices along the diagonal of a matrix of zeros."""
    made = np.zeros(np.sum([one.shape for one in matrices], axis=0), dtype)
    row = column = 0
    for one in matrices:
        made[row : row + one.shape[0], column : column + one.shape[1]] = one
        row, column = row + one.shape[0], column + one.shape[1]
    return made
