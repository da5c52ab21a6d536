"""Writes the updates of LoRA as an adapter of the library PEFT; see `peft`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.errors import CheckpointError
from meshpar.interop.export import copy_companions, exported, whole_or_not
from meshpar.interop.family_model import FamilyModel
from meshpar.interop.layout import VALUE, Layout, TensorPlace
from meshpar.interop.peft import ADAPTER, ADAPTER_CONFIG, MAGNITUDES, PREFIX
from meshpar.interop.safetensors import Written, write
from meshpar.models.decoder import DecoderModel
from meshpar.models.foreign import Foreign, Shape
from meshpar.nn.dora import norms
from meshpar.nn.lora import MAGNITUDE, NAME, LoRA, Size, is_lora


def write_adapter(
    folder: Path, model: DecoderModel | FamilyModel, lora: LoRA, params: Mapping[str, jax.Array], base: str,
    companions: Path | None,
) -> None:  # fmt: skip
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
    layout = model.layout if isinstance(model, FamilyModel) else exported(model, companions)[1]
    found = [one for one in layout.places if projections_in(one.foreign, params)]
    _check(found, params)
    modules: dict[str, Size] = {}
    tensors: list[Written] = []
    for place in found:
        update = _Update(place, layout, params, lora)
        module = place.name.removesuffix(".weight")
        modules[module] = update.size
        tensors += update.written(module)
    with whole_or_not(folder) as made:
        config = _config(lora, modules, base, found[0].foreign)
        (made / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        copy_companions(companions, made)
        write(made / ADAPTER, tensors)


def _check(found: Sequence[TensorPlace], params: Mapping[str, Any]) -> None:
    """Refuses updates that are of no matrix, or of matrices that PEFT would read in another way."""
    if experts := [one.name for one in found if one.is_of_expert]:
        raise CheckpointError(f"{experts[0]}: updates of experts are not written; export with --format hf")
    known = {lora_path(path, one) for place in found for path in place.foreign.parts for one in ("a", "b", MAGNITUDE)}
    if rest := sorted(path for path in params if is_lora(path) and path not in known):
        raise CheckpointError(f"{rest[0]}: is of no matrix that PEFT adapts; export with --format hf")
    if len({one.foreign.outputs_first for one in found}) != 1:
        raise CheckpointError("some adapted matrices are [in, out] and others [out, in]; export with --format hf")


def projections_in(foreign: Foreign, params: Mapping[str, Any]) -> list[str]:
    """The parts of a matrix that have an update: the paths of their kernels."""
    kernels = (".kernel", f".kernel{VALUE}")
    return [path for path in foreign.parts if path.endswith(kernels) and lora_path(path, "a") in params]


def lora_path(kernel: str, name: str) -> str:
    """The path of a part of a kernel's update. That of a variable of NNX names the kernel too, see `adapters`.

    >>> lora_path("blocks.attn.q.kernel", "a"), lora_path("layers.0.attn.q.kernel.value", "a")
    ('blocks.attn.q.lora.a', 'layers.0.attn.q.lora.kernel.a')
    """
    module = _projection(kernel)
    return f"{module}.{NAME}.kernel.{name}" if kernel.endswith(VALUE) else f"{module}.{NAME}.{name}"


def _projection(kernel: str) -> str:
    return kernel.removesuffix(VALUE).removesuffix(".kernel")


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
    """The update of one matrix of Hugging Face."""

    place: TensorPlace
    layout: Layout
    params: Mapping[str, jax.Array]
    lora: LoRA

    @cached_property
    def adapted(self) -> list[str]:
        return projections_in(self.place.foreign, self.params)

    @property
    def size(self) -> Size:
        """The ranks of all parts, and the scale of the first one."""
        sizes = [self._size(path) for path in self.adapted]
        return Size(sum(size.rank for size in sizes), sizes[0].scale)

    def written(self, module: str) -> Iterator[Written]:
        size_out, size_in = self.layout.sizes[self.place.name]
        dtype = np.dtype(self.params[lora_path(self.adapted[0], "a")].dtype)
        rank = self.size.rank
        yield Written(f"{PREFIX}{module}.lora_A.weight", dtype, (rank, size_in), lambda: self._matrices()[0])
        yield Written(f"{PREFIX}{module}.lora_B.weight", dtype, (size_out, rank), lambda: self._matrices()[1])
        if self.lora.use_dora:
            yield Written(f"{PREFIX}{module}{MAGNITUDES}", dtype, (size_out,), partial(self._magnitudes, dtype))

    def _matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """A [rank, in] and B [out, rank]; B has a block for each part."""
        lefts: list[np.ndarray] = []
        rights: list[np.ndarray] = []
        for path in self.place.foreign.parts:
            shape_in, shape_out = self._shapes(path)
            if path not in self.adapted:
                lefts.append(np.zeros((math.prod(shape_out), 0)))
                continue
            a, b = (self._array(lora_path(path, one)) for one in "ab")
            ratio = self._size(path).scale / self.size.scale
            rights.append(a[_without_padding(shape_in)].reshape(-1, a.shape[-1]).T)
            left = b[(slice(None), *_without_padding(shape_out))].reshape(b.shape[0], -1).T
            lefts.append(left if ratio == 1 else left * np.asarray(ratio, left.dtype))
        return np.concatenate(rights), _blocks(lefts, rights[0].dtype)

    def _magnitudes(self, dtype: np.dtype) -> np.ndarray:
        """The norm of each output's adapted weights [out]; of a part without an update, that of its weights."""
        found: list[np.ndarray] = []
        for path in self.place.foreign.parts:
            kernel = self._array(path)[_without_padding(self.layout.shapes[path])]
            whole = np.asarray(norms(jnp.asarray(kernel), tuple(range(self.place.foreign.inputs))))
            if (change := lora_path(path, MAGNITUDE)) in self.params:
                whole = whole + self._array(change)[_without_padding(self._shapes(path)[1])].astype(whole.dtype)
            found.append(whole.reshape(-1).astype(dtype))
        return np.concatenate(found)

    def _size(self, path: str) -> Size:
        return self.lora.size(_projection(path), path.removesuffix(VALUE))

    def _shapes(self, path: str) -> tuple[Shape, Shape]:
        """The inputs and the outputs of a part."""
        shape, num = self.layout.shapes[path], self.place.foreign.inputs
        return shape[:num], shape[num:]

    def _array(self, path: str) -> np.ndarray:
        return np.asarray(jax.device_get(self.params[path][self.place.index]))


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
