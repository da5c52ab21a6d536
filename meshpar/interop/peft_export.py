"""Writes the updates of LoRA as an adapter of the library PEFT; see `peft`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.errors import CheckpointError
from meshpar.interop.export import config_of, copy_companions, whole_or_not
from meshpar.interop.huggingface import layer_shapes, names_of, numbered
from meshpar.interop.peft import ADAPTER, ADAPTER_CONFIG, MAGNITUDES, PREFIX
from meshpar.interop.safetensors import Written, write
from meshpar.models.decoder import DecoderModel
from meshpar.models.foreign import EXPERT, Foreign, Shape
from meshpar.nn.dora import norms
from meshpar.nn.lora import MAGNITUDE, NAME, LoRA, Size

Place = tuple[int, ...]


class Adapted(NamedTuple):
    """A matrix of Hugging Face, and the places in our parameters and the complete name of each of its tensors."""

    foreign: Foreign
    numbered: Sequence[tuple[Place, str]]


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
    named = names_of(model, config_of(model, companions)["model_type"])
    if experts := [name for name, foreign in named if EXPERT in name and projections_in(foreign, params)]:
        raise CheckpointError(f"{experts[0]}: updates of experts are not written; export with --format hf")
    matrices = [Adapted(foreign, [*numbered(name, foreign, model)]) for name, foreign in named]
    write_matrices(folder, matrices, layer_shapes(model), lora, params, base, companions)


def write_matrices(
    folder: Path, matrices: Sequence[Adapted], shapes: Mapping[str, Shape], lora: LoRA, params: Mapping[str, jax.Array],
    base: str, companions: Path | None,
) -> None:  # fmt: skip
    """Writes the updates of those matrices that have one, see `write_adapter`.

    Args:
      shapes: of the parameters in a layer, by path.
      params: by path; of the kernel `x.kernel` the update is at `x.lora`.
    """
    found = [one for one in matrices if projections_in(one.foreign, params)]
    if len({one.foreign.outputs_first for one in found}) != 1:
        raise CheckpointError("some adapted matrices are [in, out] and others [out, in]; export with --format hf")
    modules: dict[str, Size] = {}
    tensors: list[Written] = []
    for foreign, places in found:
        update = _Update(foreign, shapes, params, lora)
        for place, complete in places:
            module = complete.removesuffix(".weight")
            modules[module] = update.size
            tensors += update.written(module, place)
    with whole_or_not(folder) as made:
        config = _config(lora, modules, base, found[0].foreign)
        (made / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        copy_companions(companions, made)
        write(made / ADAPTER, tensors)


def projections_in(foreign: Foreign, params: Mapping[str, Any]) -> list[str]:
    """The parts of a matrix that have an update: the paths of their kernels."""
    return [path for path in foreign.parts if path.endswith(".kernel") and f"{_lora(path)}.a" in params]


def _projection(kernel: str) -> str:
    return kernel.removesuffix(".kernel")


def _lora(kernel: str) -> str:
    return f"{_projection(kernel)}.{NAME}"


def _config(lora: LoRA, modules: Mapping[str, Size], base: str, foreign: Foreign) -> dict[str, Any]:
    alphas = {module: lora.alpha_of(*size) for module, size in modules.items()}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": lora.rank, "lora_alpha": lora.alpha,
        "rank_pattern": {module: size.rank for module, size in modules.items() if size.rank != lora.rank},
        "alpha_pattern": {module: x for module, x in alphas.items() if not math.isclose(x, lora.alpha)},
        "target_modules": list(modules), "fan_in_fan_out": not foreign.outputs_first, "bias": "none",
        "lora_dropout": 0.0, "use_rslora": lora.use_rslora, "use_dora": lora.use_dora, "init_lora_weights": True,
        "modules_to_save": None,
    }  # fmt: skip


@dataclass(frozen=True)
class _Update:
    """The update of one matrix of Hugging Face, in any layer.

    Args:
      shapes: of the parameters in a layer, by path.
    """

    foreign: Foreign
    shapes: Mapping[str, Shape]
    params: Mapping[str, jax.Array]
    lora: LoRA

    @property
    def size(self) -> Size:
        """The ranks of all parts, and the scale of the first one."""
        sizes = [self.lora.size(_projection(path), path) for path in projections_in(self.foreign, self.params)]
        return Size(sum(size.rank for size in sizes), sizes[0].scale)

    def written(self, module: str, place: Place) -> Iterator[Written]:
        """The tensors of a layer."""
        first, *others = self.foreign.parts
        size_in = math.prod(self.shapes[first][: self.foreign.inputs])
        size_out = sum(math.prod(self._outputs(part)) for part in (first, *others))
        dtype = np.dtype(self.params[f"{_lora(projections_in(self.foreign, self.params)[0])}.a"].dtype)
        rank, make = self.size.rank, partial(self._matrices, place)
        yield Written(f"{PREFIX}{module}.lora_A.weight", dtype, (rank, size_in), lambda: make()[0])
        yield Written(f"{PREFIX}{module}.lora_B.weight", dtype, (size_out, rank), lambda: make()[1])
        if self.lora.use_dora:
            magnitudes = partial(self._magnitudes, place, dtype)
            yield Written(f"{PREFIX}{module}{MAGNITUDES}", dtype, (size_out,), magnitudes)

    def _matrices(self, place: Place) -> tuple[np.ndarray, np.ndarray]:
        """A [rank, in] and B [out, rank] of one layer; B has a block for each part."""
        lefts: list[np.ndarray] = []
        rights: list[np.ndarray] = []
        adapted = projections_in(self.foreign, self.params)
        for path in self.foreign.parts:
            shape_in, shape_out = self.shapes[path][: self.foreign.inputs], self._outputs(path)
            if path not in adapted:
                lefts.append(np.zeros((math.prod(shape_out), 0)))
                continue
            a, b = (self._array(f"{_lora(path)}.{one}", place) for one in "ab")
            ratio = self.lora.size(_projection(path), path).scale / self.size.scale
            rights.append(a[_without_padding(shape_in)].reshape(-1, a.shape[-1]).T)
            left = b[(slice(None), *_without_padding(shape_out))].reshape(b.shape[0], -1).T
            lefts.append(left if ratio == 1 else left * np.asarray(ratio, left.dtype))
        return np.concatenate(rights), _blocks(lefts, rights[0].dtype)

    def _magnitudes(self, place: Place, dtype: np.dtype) -> np.ndarray:
        """The norm of each output's adapted weights [out]; of a part without an update, that of its weights."""
        found: list[np.ndarray] = []
        for path in self.foreign.parts:
            kernel = self._array(path, place)[_without_padding(self.shapes[path])]
            whole = np.asarray(norms(jnp.asarray(kernel), tuple(range(self.foreign.inputs))))
            if (change := f"{_lora(path)}.{MAGNITUDE}") in self.params:
                whole = whole + self._array(change, place)[_without_padding(self._outputs(path))].astype(whole.dtype)
            found.append(whole.reshape(-1).astype(dtype))
        return np.concatenate(found)

    def _outputs(self, path: str) -> Shape:
        return self.shapes[path][self.foreign.inputs :]

    def _array(self, path: str, place: Place) -> np.ndarray:
        return np.asarray(jax.device_get(self.params[path][place]))


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
