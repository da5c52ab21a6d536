"""Reads a model from a Hugging Face folder: `config.json`, and safetensors in one or more files."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from meshpar.config import flatten
from meshpar.errors import CheckpointError, ConfigError, Problems
from meshpar.interop import architectures
from meshpar.interop.folder import CONFIG, read_json, tensors_of
from meshpar.interop.layout import Index, Layout, TensorPart, decoder_layout
from meshpar.interop.safetensors import Tensor
from meshpar.models.contract import ModelContract
from meshpar.models.decoder import DecoderModel
from meshpar.models.foreign import EXPERT, Shape
from meshpar.nn.transformer import BLOCKS

FLOATS = ("float64", "float32", "float16", "bfloat16")
HEAD = "lm_head.weight"
# Buffers that older versions of transformers saved with the parameters: masks and rotary frequencies. They are ignored.
BUFFERS = (
    ".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias",
)  # fmt: skip


class Sizes(Protocol):
    """What the comparison of tensors reads of a model."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def tie_embeddings(self) -> bool: ...


@dataclass(frozen=True)
class Pretrained:
    """A checked folder: its config is supported, and its files hold every tensor, with the right shape.

    Args:
      config: the content of `config.json`.
      tensors: by name; not read yet.
      is_upcycled: whether the MLP of each block becomes each of the experts of a run's model.
      left_out: tensors of the folder that the model has no use for.
    """

    folder: Path
    config: dict[str, Any]
    model: DecoderModel
    layout: Layout
    tensors: Mapping[str, Tensor]
    is_upcycled: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def dtype(self) -> np.dtype:
        """The dtype that most elements have."""
        sizes = Counter[np.dtype]()
        for tensor in self.tensors.values():
            sizes[tensor.dtype] += math.prod(tensor.shape)
        return max(sizes, key=sizes.__getitem__)

    @property
    def paths(self) -> list[str]:
        """The paths of the parameters that the folder holds."""
        return list(self._parts)

    def params(self, structs: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Reads our parameters sharded. A shard that several devices of a process hold is read once.

        Args:
          structs: path -> dtype, shape and sharding; padding of the vocabulary or of the layers is filled with zeros.

        Memory: the arrays, and a second copy of one of them at a time; the largest are read first.
        """
        order = sorted(structs, key=lambda path: -math.prod(structs[path].shape))
        read = {path: jax.block_until_ready(self._array(path, structs[path])) for path in order}
        return {path: read[path] for path in structs}

    def _array(self, path: str, struct: jax.ShapeDtypeStruct) -> jax.Array:
        shards: dict[Any, np.ndarray] = {}

        def shard(index: Any) -> np.ndarray:
            ranges = tuple(dim.indices(size)[:2] for dim, size in zip(index, struct.shape, strict=True))
            if ranges not in shards:
                shards[ranges] = self._shard(path, [slice(*dim) for dim in ranges], struct.dtype)
            return shards[ranges]

        return jax.make_array_from_callback(struct.shape, struct.sharding, shard)

    @cached_property
    def _parts(self) -> dict[str, tuple[Shape, dict[Index, TensorPart]]]:
        """Path -> the shape of the parameter, and the tensors that it is read from."""
        found: dict[str, tuple[Shape, dict[Index, TensorPart]]] = {}
        for path, parts in self.layout.parts.items():
            mlp = "blocks.mlp."
            in_run = path.replace(mlp, f"{mlp}experts.") if self.is_upcycled else path
            if all(part.name in self.tensors for part in parts.values()):
                found[in_run] = self.layout.shapes[path], parts
        return found

    def _shard(self, path: str, index: list[slice], dtype: np.dtype) -> np.ndarray:
        """A shard of a parameter, with zeros in its padding."""
        shape, parts = self._parts[path]
        shard = np.zeros([dim.stop - dim.start for dim in index], dtype)
        stacked = [range(dim.start, dim.stop) for dim in index[: len(next(iter(parts)))]]
        index = index[len(index) - len(shape) :]  # all experts of an upcycled MLP are equal
        stored = [slice(dim.start, min(dim.stop, size)) for dim, size in zip(index, shape, strict=True)]
        into = tuple(slice(0, max(0, dim.stop - dim.start)) for dim in stored)
        if any(not dim.stop for dim in into):
            return shard
        for here in np.ndindex(*map(len, stacked)):
            part = parts.get(tuple(chosen[i] for chosen, i in zip(stacked, here, strict=True)))
            if part is not None:  # a layer that is no padding
                shard[(*here, ..., *into)] = self._block(part, shape, stored)
        return shard

    def _block(self, part: TensorPart, shape: Shape, index: list[slice]) -> np.ndarray:
        """A slice of one layer's parameter, in the dtype of the file."""
        num = part.foreign.inputs
        inputs, sizes_in = _flat(index[:num], shape[:num])
        outputs, sizes_out = _flat(index[num:], shape[num:])
        outputs = slice(part.begin + outputs.start, part.begin + outputs.stop)
        tensor = self.tensors[part.name]
        if not num:
            block = tensor.read(outputs)
        elif part.foreign.outputs_first:
            block = tensor.read(outputs, inputs).T
        else:
            block = tensor.read(inputs, outputs)
        # Dims that Hugging Face stores as one are split here; the first of each group was sliced in the file.
        rest = tuple(slice(None) if dim in (0, num) else part for dim, part in enumerate(index))
        return block.reshape((*sizes_in, *sizes_out))[rest]

    def check(self, model: ModelContract) -> None:
        """Checks that the folder's model is the model of a run.

        Raises:
          ConfigError: the run's model is imported; or lists each key that differs.
        """
        where = self.folder / CONFIG
        problems = Problems()
        if not isinstance(model, DecoderModel):
            what = "describes one of meshpar's own models, but the run's model is imported"
            raise ConfigError(f"init.from_hf: {where} {what}; set model to that one, or init.from_hf=null")
        decoder = self._dense(model, problems) if self.is_upcycled else model
        problems.raise_any(ConfigError, "init.upcycle does not fit the model:")
        in_run = flatten(architectures.canonical(decoder))
        in_folder = flatten(architectures.canonical(self.model))
        for key in sorted(key for key in in_run.keys() | in_folder.keys() if in_run.get(key) != in_folder.get(key)):
            ours, theirs = (json.dumps(keys.get(key)) for keys in (in_run, in_folder))
            problems.add(f"model.{key}", f"{ours} in this run, {theirs} in {where}", f"model.{key}={theirs}")
        problems.raise_any(ConfigError, "the model of init.from_hf differs from the run's:")

    def fitted(self, model: ModelContract) -> Pretrained:
        """The folder for the model of a run, after `check`."""
        self.check(model)
        return self

    def _dense(self, model: DecoderModel, problems: Problems) -> DecoderModel:
        """The dense model from which a run's model is upcycled. Reports settings with which the two would differ."""
        experts = model.experts
        if experts is None or self.model.experts is not None:
            what = "the run's model has no experts" if experts is None else f"the model of {self.folder} has experts"
            problems.add("init.upcycle", f"{what}; upcycling makes experts from a dense model", "init.upcycle=false")
            return model
        width = self.model.intermediate_size
        if experts.intermediate_size != width:
            what = f"{experts.intermediate_size} here, and {width} in the MLP of {self.folder}"
            problems.add("model.experts.intermediate_size", what, f"model.experts.intermediate_size={width}")
        if self.model.mlp_bias:
            problems.add("model.mlp_bias", f"the MLP of {self.folder} has biases, and experts have none")
        if self.model.num_layers != len(model.layers_in(BLOCKS)):
            what = "some layers keep their MLP, and upcycling makes experts from the MLPs of all layers"
            problems.add("model.experts", what, "model.experts.every=1 and model.experts.first_dense=0")
        if experts.shared:
            what = "shared experts would be added to a result that is complete without them"
            problems.add("model.experts.shared", what, "model.experts.shared=0")
        return model.model_copy(update={"experts": None, "intermediate_size": width})


def _flat(index: list[slice], sizes: Shape) -> tuple[slice, Shape]:
    """The slice of a group of dims that the file stores as one dim, and the shape of the group in this slice."""
    if not index:
        return slice(0, 1), ()
    rest = math.prod(sizes[1:])
    return slice(index[0].start * rest, index[0].stop * rest), (index[0].stop - index[0].start, *sizes[1:])


# Opening ------------------------------------------------------------------------------------------------------


def open_pretrained(folder: Path) -> Pretrained:
    """Reads the config and the headers of a folder of one of meshpar's own decoders, but no tensor.

    Raises:
      CheckpointError: lists every problem: an unknown architecture, a truncated file, a wrong header, a missing or an
        unknown tensor, or a shape that differs from the config's.
    """
    problems = Problems()
    if not folder.exists():
        raise CheckpointError(f"{folder} cannot be imported: there is no such folder{hub_hint(folder)}")
    config = read_json(folder, CONFIG, problems)
    found = tensors_of(folder, problems)
    most_layers = len(found) or architectures.LARGEST  # a layer has at least one
    model = architectures.read(config, str(folder / CONFIG), problems, most_layers) if config else None
    problems.raise_any(CheckpointError, f"{folder} cannot be imported:")
    assert model is not None
    layout = decoder_layout(model, config["model_type"])
    tensors = layout.complete(found)
    _check_num_experts(tensors, config["model_type"], model, problems)
    problems.raise_any(CheckpointError, f"{folder} does not hold what its {CONFIG} describes:")
    model = _with_own_head(model, tensors, layout.places[0].name)
    layout = decoder_layout(model, config["model_type"])
    compare(tensors, layout.expected, model, problems)
    problems.raise_any(CheckpointError, f"{folder} does not hold what its {CONFIG} describes:")
    return Pretrained(folder, config, model, layout, {name: tensors[name] for name in layout.expected})


def hub_hint(path: Path) -> str:
    """How to get a model that is named as on the Hugging Face Hub, `owner/name`; empty for other paths."""
    owner, _, name = str(path).partition("/")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(path)) or Path(owner).exists():
        return ""
    get = f"hf download {path} --local-dir {name}"
    return f". Nothing is downloaded: if it is a name on the Hugging Face Hub, run {get}, and name the folder {name}"


def _with_own_head(model: DecoderModel, tensors: dict[str, Tensor], embedding: str) -> DecoderModel:
    """The model as transformers loads it if its config ties the output projection to the embedding.

    If the file has both, and they differ, neither is replaced. If it has only the output projection, that is both.
    """
    if not model.tie_embeddings or HEAD not in tensors:
        return model
    if embedding not in tensors:
        tensors[embedding] = tensors[HEAD]
        return model
    return (
        model if _are_equal(tensors[HEAD], tensors[embedding]) else model.model_copy(update={"tie_embeddings": False})
    )


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two matrices are equal. They are compared by some rows at a time."""
    if one.shape != other.shape or len(one.shape) != 2:
        return False
    step = max(1, 2**24 // max(1, one.shape[1]))
    blocks = (slice(begin, min(begin + step, one.shape[0])) for begin in range(0, one.shape[0], step))
    return all(np.array_equal(one.read(rows), other.read(rows)) for rows in blocks)


def _check_num_experts(tensors: Mapping[str, Tensor], kind: str, model: DecoderModel, problems: Problems) -> None:
    """Reports a number of experts that differs from the config's once, not for each missing or unknown tensor."""
    patterns = [re.escape(name) for name in architectures.ARCHITECTURES[kind].names if EXPERT in name]
    number = re.compile("|".join(one.replace(r"\*", r"\d+").replace(r"\#", r"(\d+)") for one in patterns))
    matches = [number.fullmatch(name) for name in tensors] if patterns else []
    found = {int(match[match.lastindex or 0]) for match in matches if match}
    if model.experts and found and len(found) != model.experts.num:
        what = f"{CONFIG} has {model.experts.num}, but there are tensors of {len(found)}"
        problems.add("the number of experts", what, f"the {CONFIG} of this checkpoint")


def compare(tensors: Mapping[str, Tensor], expected: Mapping[str, Shape], model: Sizes, problems: Problems) -> None:
    """Reports the tensors that are missing, unknown, or of another shape than the config's."""
    for name, shape in expected.items():
        compare_one(name, tensors.get(name), shape, model, problems)
    tied = {HEAD} if model.tie_embeddings else set()
    for name in tensors.keys() - expected.keys() - tied:
        if not name.endswith(BUFFERS):
            problems.add(name, f"is in {tensors[name].file.name}, but is no parameter of this model")


def compare_one(name: str, tensor: Tensor | None, shape: Shape, model: Sizes, problems: Problems) -> None:
    """Reports a tensor that is missing, of another shape, or no float."""
    if tensor is None:
        fix = "or tie_word_embeddings: true is missing there" if name == HEAD else ""
        problems.add(name, f"is missing; {CONFIG} requires {list(shape)}", fix)
    elif tensor.shape != shape:
        of_vocabulary = model.vocab_size in shape and model.vocab_size not in tensor.shape
        fix = f"{CONFIG} has vocab_size {model.vocab_size}" if of_vocabulary else ""
        problems.add(name, f"is {list(tensor.shape)} in {tensor.file.name}, {CONFIG} requires {list(shape)}", fix)
    elif tensor.dtype.name not in FLOATS:
        problems.add(name, f"is {tensor.dtype} in {tensor.file.name}, and only {', '.join(FLOATS)} are read")
