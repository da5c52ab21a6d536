"""Reads the files of an adapter of the library PEFT: LoRA, whose update is added to a tensor when that is read.

    adapter_config.json          the base model, the ranks and the scales
    adapter_model.safetensors    base_model.model.MODULE.lora_A.weight [rank, in], MODULE.lora_B.weight [out, rank];
                                 with DoRA also MODULE.lora_magnitude_vector [out]

Source: github.com/huggingface/peft, `LoraConfig`; rank-stabilized LoRA: Kalajdzievski 2023, arXiv:2312.03732; DoRA: Liu
et al. 2024, arXiv:2402.09353.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshpar.errors import CheckpointError, Problems
from meshpar.interop.folder import check_inside, read_json
from meshpar.interop.safetensors import Tensor, tensors_in
from meshpar.models.foreign import Shape

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter_model.safetensors"
PREFIX = "base_model.model."
MAGNITUDES = ".lora_magnitude_vector"
_READ = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out",
         "base_model_name_or_path", "peft_type", "init_lora_weights", "bias"}  # fmt: skip
_WITHOUT_EFFECT = {
    "target_modules", "exclude_modules", "lora_dropout", "task_type", "inference_mode", "auto_mapping", "peft_version",
    "revision", "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size", "loftq_config",
    "eva_config", "lora_ga_config", "ensure_weight_tying",
}  # fmt: skip
"""Keys that say which modules were adapted, which the tensors say too, or that act in training alone."""
_INITIAL = (True, False, None, "gaussian", "orthogonal", "eva")
"""How matrices were initialized. Others, such as pissa, changed the weights of the base model too."""


@dataclass(frozen=True)
class LayerUpdate:
    """What an adapter adds to a matrix of one layer: `scale * a @ b`.

    Args:
      a, b: float32 [inputs..., rank], [rank, outputs...].
      magnitudes: float32 [outputs...], the norm of each output's weights after the update, of DoRA; None for LoRA.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float
    magnitudes: np.ndarray | None = None

    @property
    def rank(self) -> int:
        return len(self.b)

    def part(self, begin: int, inputs: Shape, outputs: Shape) -> LayerUpdate:
        """That of some outputs, from `begin` on, with the dims of a parameter."""
        chosen = slice(begin, begin + math.prod(outputs))
        magnitudes = None if self.magnitudes is None else self.magnitudes[chosen].reshape(outputs)
        b = self.b[:, chosen].reshape(self.rank, *outputs)
        return LayerUpdate(self.a.reshape(*inputs, self.rank), b, self.scale, magnitudes)


@dataclass(frozen=True)
class AdaptedTensor(Tensor):
    """A matrix with the update of an adapter, which is computed for the slice that is read.

    Args:
      is_transposed: whether the tensor is [in, out].

    Numerics: added in float32 at least, then rounded to the dtype of the tensor.
    """

    update: LayerUpdate
    is_transposed: bool

    def read(self, rows: slice = slice(None), columns: slice = slice(None)) -> np.ndarray:
        magnitudes = self.update.magnitudes
        if magnitudes is None:
            return self._sum(rows, columns).astype(self.dtype)
        every = slice(None)  # the norm of an output's weights needs all inputs
        if self.is_transposed:
            whole = self._sum(every, columns)
            return (whole * (magnitudes[columns] / np.linalg.norm(whole, axis=0)))[rows].astype(self.dtype)
        whole = self._sum(rows, every)
        return (whole * (magnitudes[rows] / np.linalg.norm(whole, axis=1))[:, None])[:, columns].astype(self.dtype)

    def _sum(self, rows: slice, columns: slice) -> np.ndarray:
        """The matrix and its low-rank update."""
        base = super().read(rows, columns)
        a, b = self.update.a, self.update.b
        left, right = (a, b) if self.is_transposed else (b.T, a.T)
        wide = np.promote_types(base.dtype, np.float32) if base.dtype.kind == "f" else np.dtype(np.float32)
        return base.astype(wide) + self.update.scale * (left[rows] @ right[:, columns]).astype(wide)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of PEFT."""
    return (folder / ADAPTER_CONFIG).is_file()


def base_of(folder: Path) -> Path:
    """The folder of the model that an adapter belongs to.

    Raises:
      CheckpointError: `base_model_name_or_path` is no folder here.
    """
    problems = Problems()
    named = read_json(folder, ADAPTER_CONFIG, problems).get("base_model_name_or_path")
    problems.raise_any(CheckpointError, f"the adapter {folder} cannot be read:")
    found = [path for path in (Path(str(named)), folder / str(named)) if named and path.is_dir()]
    if found and is_adapter(found[0]):
        raise CheckpointError(f"{folder} is an adapter of {found[0]}, which is an adapter too; merge that one first")
    if not found:
        where = f"{folder / ADAPTER_CONFIG}: base_model_name_or_path = {named!r}"
        fix = "nothing is downloaded: write the path of the model's folder there, as it is or relative to the adapter"
        raise CheckpointError(f"{where} is no folder; {fix}")
    return found[0]


def files_of(folder: Path) -> Path:
    """The folder with the config, the tokenizer and the templates of a model: of an adapter, that of its base model."""
    return base_of(folder) if is_adapter(folder) else folder


def adapted(folder: Path, tensors: Mapping[str, Tensor], prefix: str, transposed: Collection[str]) -> dict[str, Tensor]:
    """The tensors of a model, with the updates of an adapter.

    Args:
      prefix: of the names of tensors, which files of the model without its output projection leave out.
      transposed: the names of the tensors that are [in, out]. As in PEFT, this decides, and not `fan_in_fan_out`.

    Memory: the matrices of the adapter.

    Raises:
      CheckpointError: see `updates_in`.
    """
    sizes = {name: one.shape[::-1] if name in transposed else one.shape for name, one in tensors.items()}
    result = dict(tensors)
    for name, update in updates_in(folder, sizes, prefix).items():
        one = tensors[name]
        result[name] = AdaptedTensor(one.file, one.dtype, one.shape, one.begin, update, name in transposed)
    return result


def updates_in(folder: Path, sizes: Mapping[str, tuple[int, ...]], prefix: str) -> dict[str, LayerUpdate]:
    """The updates of an adapter, by the names of the model's tensors.

    Args:
      sizes: name of each tensor of the model -> its shape, of a matrix (out, in).
      prefix: see `adapted`.

    Memory: the matrices of the adapter.

    Raises:
      CheckpointError: lists the options that are not supported, and each matrix that does not fit the model.
    """
    problems = Problems()
    config = read_json(folder, ADAPTER_CONFIG, problems)
    found = _matrices(folder, problems)
    problems.raise_any(CheckpointError, f"the adapter {folder} cannot be read:")
    _check_config(config, f"{folder / ADAPTER_CONFIG}", problems)
    result: dict[str, LayerUpdate] = {}
    modules = sorted({name.rpartition(".lora_")[0] for name in found})
    uses_dora = bool(config.get("use_dora"))
    for module in modules:
        of_dora = [
            found.pop(name) for name in (f"{module}{MAGNITUDES}", f"{module}{MAGNITUDES}.weight") if name in found
        ]
        a, b = found.pop(f"{module}.lora_A.weight", None), found.pop(f"{module}.lora_B.weight", None)
        name = f"{module}.weight" if module.startswith((prefix, "lm_head")) else f"{prefix}{module}.weight"
        if a is None or b is None:
            problems.add(module, "has one of lora_A and lora_B, and not the other", "save the adapter again")
        elif name not in sizes:
            problems.add(module, "the model has no such matrix", "the adapter of this model")
        elif len(of_dora) != uses_dora:
            what = f"has {'' if of_dora else 'no '}magnitudes, and use_dora is {json.dumps(uses_dora)}"
            problems.add(module, what, "save the adapter again")
        elif fitting := _fitting(module, sizes[name], a, b, config, problems):
            result[name] = _with_magnitudes(module, fitting, of_dora, problems)
    problems.raise_any(CheckpointError, f"the adapter {folder} cannot be added to its model:")
    return result


def _matrices(folder: Path, problems: Problems) -> dict[str, Tensor]:
    """The tensors of the adapter by name, without the prefix; each must be a matrix of LoRA."""
    try:
        check_inside(folder, ADAPTER)
    except OSError as error:
        problems.add(str(folder / ADAPTER), f"cannot be read: {error.strerror}")
        return {}
    found = {name.removeprefix(PREFIX): tensor for name, tensor in tensors_in(folder / ADAPTER, problems).items()}
    for name in [
        name for name in found if not re.fullmatch(rf".+(\.lora_[AB]\.weight|{re.escape(MAGNITUDES)}(\.weight)?)", name)
    ]:
        what = "is no matrix of LoRA; biases, embeddings and whole modules are not supported"
        problems.add(f"{folder / ADAPTER}: {name}", what)
    return found


def _check_config(config: Mapping[str, Any], where: str, problems: Problems) -> None:
    if (kind := config.get("peft_type")) != "LORA":
        problems.add(f"{where}: peft_type", f"{kind!r} is not supported", "LORA")
    if config.get("bias", "none") != "none":
        problems.add(f"{where}: bias", f"{config['bias']!r}: trained biases are not supported", "none")
    if (initial := config.get("init_lora_weights")) not in _INITIAL:
        what = f"{initial!r} changed the weights of the base model too"
        fix = "convert the adapter to plain LoRA: save_pretrained(path_initial_model_for_weight_conversion=...)"
        problems.add(f"{where}: init_lora_weights", what, fix)
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(key) or {}
        if not isinstance(pattern, dict) or not all(map(_is_pattern, pattern)):
            problems.add(f"{where}: {key}", "is no object of regular expressions and numbers")
    problems.raise_any(CheckpointError, "the adapter is not supported:")
    for key, value in config.items():
        if key not in _READ | _WITHOUT_EFFECT and value not in (None, False, [], {}):
            problems.add(f"{where}: {key}", "is not supported", "leave it out, or merge the adapter with PEFT")


def _fitting(
    module: str, size: tuple[int, ...], a: Tensor, b: Tensor, config: Mapping[str, Any], problems: Problems
) -> LayerUpdate | None:
    """The update, if its matrices fit a matrix of this shape, (out, in)."""
    rank = _pattern(config.get("rank_pattern"), module, config.get("r"))
    alpha = _pattern(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    if type(rank) is not int or rank < 1 or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        problems.add(module, f"its rank {rank!r} or its lora_alpha {alpha!r} is no such number")
        return None
    if len(size) != 2 or a.shape != (rank, size[1]) or b.shape != (size[0], rank):
        what = f"lora_A{list(a.shape)} and lora_B{list(b.shape)} of rank {rank} do not fit"
        problems.add(module, f"{what} the model's matrix{list(size)}", "the adapter of this model")
        return None
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    left, right = (one.read().astype(np.float32).T for one in (a, b))
    return LayerUpdate(left, right, scale)


def _with_magnitudes(module: str, update: LayerUpdate, of_dora: Sequence[Tensor], problems: Problems) -> LayerUpdate:
    for one in of_dora:
        if one.shape != update.b.shape[1:]:
            what = f"lora_magnitude_vector{list(one.shape)} does not fit lora_B{list(update.b.T.shape)}"
            problems.add(module, what, "the adapter of this model")
        update = replace(update, magnitudes=one.read().astype(np.float32))
    return update


def _pattern(pattern: Any, module: str, default: Any) -> Any:
    """The value of a module: of the first pattern that matches it from a dot on, as in PEFT, or else the default."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def _is_pattern(key: str) -> bool:
    try:
        re.compile(key)
    except re.error:
        return False
    return True
