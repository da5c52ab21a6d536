"""Reads a model from a Hugging Face folder: `config.json`, and safetensors in one or more files."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from meshpar.config import flatten
from meshpar.errors import CheckpointError, ConfigError, Problems
from meshpar.interop import architectures
from meshpar.interop.folder import check_inside, read_json
from meshpar.interop.safetensors import Tensor, tensors_in
from meshpar.models.contract import ModelContract
from meshpar.models.decoder import DecoderModel
from meshpar.models.foreign import EXPERT, LAYER, Foreign, Shape
from meshpar.nn.describe import describe
from meshpar.nn.transformer import BLOCKS, DENSE_BLOCKS
from meshpar.tree import flatten_with_paths

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
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
class TensorPart:
    """The place of one of our parameters in the tensors of a folder.

    Args:
      name: of the tensor, see `Names`.
      shape: of the parameter in one layer and expert, without padding of the vocabulary.
      begin: index of the parameter's first output in the tensor.
    """

    name: str
    foreign: Foreign
    shape: Shape
    begin: int


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
                shards[ranges] = self._shard(self._parts[path], [slice(*dim) for dim in ranges], struct.dtype)
            return shards[ranges]

        return jax.make_array_from_callback(struct.shape, struct.sharding, shard)

    def _shard(self, part: TensorPart, index: list[slice], dtype: np.dtype) -> np.ndarray:
        """A shard of a parameter, with zeros in its padding."""
        shard = np.zeros([dim.stop - dim.start for dim in index], dtype)
        numbers = [numbers[index.pop(0)] for _, numbers in _numbers(part.name, part.foreign, self.model)]
        index = index[len(index) - len(part.shape) :]  # all experts of an upcycled MLP are equal
        stored = [slice(dim.start, min(dim.stop, size)) for dim, size in zip(index, part.shape, strict=True)]
        into = tuple(slice(0, max(0, dim.stop - dim.start)) for dim in stored)
        if any(not dim.stop for dim in into):
            return shard
        for place in np.ndindex(*map(len, numbers)):
            name = _filled(part.name, [chosen[i] for chosen, i in zip(numbers, place, strict=True)])
            shard[place][(..., *into)] = self._block(part, name, stored)
        return shard

    def _block(self, part: TensorPart, name: str, index: list[slice]) -> np.ndarray:
        """A slice of one layer's parameter, in the dtype of the file."""
        num = part.foreign.inputs
        inputs, sizes_in = _flat(index[:num], part.shape[:num])
        outputs, sizes_out = _flat(index[num:], part.shape[num:])
        outputs = slice(part.begin + outputs.start, part.begin + outputs.stop)
        if not num:
            block = self.tensors[name].read(outputs)
        elif part.foreign.outputs_first:
            block = self.tensors[name].read(outputs, inputs).T
        else:
            block = self.tensors[name].read(inputs, outputs)
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
        if not (decoder := model.hugging_face()):
            what = "describes one of meshpar's own models, but the run's model is imported"
            raise ConfigError(f"init.from_hf: {where} {what}; set model to that one, or init.from_hf=null")
        if self.is_upcycled:
            decoder = self._dense(decoder, problems)
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

    @property
    def prefix(self) -> str:
        """That of the names of all tensors but the output projection's."""
        return _prefix(names_of(self.model, self.config["model_type"]))

    @property
    def transposed(self) -> set[str]:
        """The names of the matrices that are stored as [in, out]."""
        named = names_of(self.model, self.config["model_type"])
        return {
            complete
            for name, foreign in named
            if foreign.inputs and not foreign.outputs_first
            for _, complete in numbered(name, foreign, self.model)
        }

    @property
    def paths(self) -> list[str]:
        """The paths of the parameters."""
        return list(self._parts)

    @cached_property
    def _parts(self) -> dict[str, TensorPart]:
        shapes = layer_shapes(self.model)
        found: dict[str, TensorPart] = {}
        for name, foreign in names_of(self.model, self.config["model_type"]):
            begin = 0
            for path in foreign.parts:
                mlp = "blocks.mlp."
                in_run = path.replace(mlp, f"{mlp}experts.") if self.is_upcycled else path
                found[in_run] = TensorPart(name, foreign, shapes[path], begin)
                begin += math.prod(shapes[path][foreign.inputs :])
        return found


def _flat(index: list[slice], sizes: Shape) -> tuple[slice, Shape]:
    """The slice of a group of dims that the file stores as one dim, and the shape of the group in this slice."""
    if not index:
        return slice(0, 1), ()
    rest = math.prod(sizes[1:])
    return slice(index[0].start * rest, index[0].stop * rest), (index[0].stop - index[0].start, *sizes[1:])


def names_of(model: DecoderModel, kind: str) -> list[tuple[str, Foreign]]:
    """The names of a model's tensors: the names of its architecture, for the parameters that the model has.

    A name of `Names` occurs once for each stack of layers that has its parameters.
    """
    shapes = layer_shapes(model)
    found: list[tuple[str, Foreign]] = []
    for name, foreign in architectures.ARCHITECTURES[kind].names.items():
        for stack in (BLOCKS, DENSE_BLOCKS) if LAYER in name else (BLOCKS,):
            parts = tuple(_in_stack(path, stack) for path in foreign.parts)
            if parts[0] in shapes:
                found.append((name, replace(foreign, parts=parts)))
    return found


def _in_stack(path: str, stack: str) -> str:
    prefix = f"{BLOCKS}."
    return f"{stack}.{path.removeprefix(prefix)}" if path.startswith(prefix) else path


def layer_shapes(model: DecoderModel) -> dict[str, Shape]:
    """Path -> shape of a parameter, of one layer and one expert, without padding of the vocabulary."""
    plain = model.model_copy(update={"pad_vocab_to_multiple": 1})
    specs = flatten_with_paths(describe(plain.abstract()))
    return {path: spec.shape[sum(dim in _NUMBERED for dim in spec.dims[:2]) :] for path, spec in specs.items()}


_NUMBERED = ("layers", "experts")
"""The leading dims of our parameters. Hugging Face stores a tensor for each index along them."""


def numbered(name: str, foreign: Foreign, model: DecoderModel) -> Iterator[tuple[tuple[int, ...], str]]:
    """For each layer and expert, the place of a tensor in our stacked parameters, and its complete name."""
    numbers = [chosen for _, chosen in _numbers(name, foreign, model)]
    for place in np.ndindex(*map(len, numbers)):
        yield place, _filled(name, [chosen[i] for chosen, i in zip(numbers, place, strict=True)])


def _numbers(name: str, foreign: Foreign, model: DecoderModel) -> list[tuple[str, Sequence[int]]]:
    """The marks in a name, and the numbers that replace them, in the order of our stacked parameters."""
    stack = foreign.parts[0].partition(".")[0]
    numbers = ((LAYER, model.layers_in(stack)), (EXPERT, range(model.experts.num if model.experts else 0)))
    return [(mark, chosen) for mark, chosen in numbers if mark in name]


def _filled(name: str, numbers: Sequence[int]) -> str:
    marks = [mark for mark in (LAYER, EXPERT) if mark in name]
    for mark, number in zip(marks, numbers, strict=True):
        name = name.replace(mark, str(number))
    return name


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
    names = names_of(model, config["model_type"])
    tensors = with_prefix(found, [name for name, _ in names])
    _check_num_experts(tensors, names, model, problems)
    problems.raise_any(CheckpointError, f"{folder} does not hold what its {CONFIG} describes:")
    model = _with_own_head(model, tensors, names[0][0])
    names = names_of(model, config["model_type"])
    expected = dict(_expected(model, names))
    compare(folder, tensors, expected, model, problems)
    problems.raise_any(CheckpointError, f"{folder} does not hold what its {CONFIG} describes:")
    return Pretrained(folder, config, model, {name: tensors[name] for name in expected})


def _prefix(names: Sequence[tuple[str, Foreign]]) -> str:
    return names[0][0].partition(".")[0] + "."


def with_prefix(tensors: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """The tensors by complete names: checkpoints without an output projection lack the prefix of the others."""
    prefix, *heads = dict.fromkeys(name.partition(".")[0] + "." for name in names)
    return {
        name if name.startswith((prefix, "lm_head.", *heads)) else prefix + name: tensor
        for name, tensor in tensors.items()
    }


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


def tensors_of(folder: Path, problems: Problems) -> dict[str, Tensor]:
    if os.path.lexists(folder / INDEX):
        return _indexed(folder, problems)
    if not os.path.lexists(folder / WEIGHTS):
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        fix = f"{pickles[0]} is a pickle, which is not read: save the model as safetensors" if pickles else ""
        problems.add(str(folder), f"there is neither {WEIGHTS} nor {INDEX}", fix)
        return {}
    return _tensors_of(folder, WEIGHTS, problems)


def _indexed(folder: Path, problems: Problems) -> dict[str, Tensor]:
    where = read_json(folder, INDEX, problems).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        problems.add(str(folder / INDEX), "has no weight_map from names to files")
        return {}
    found: dict[str, Tensor] = {}
    for file in sorted(set(where.values())):
        if Path(file).name != file:
            problems.add(f"{folder / INDEX}: weight_map", f"{file!r} is not the name of a file in this folder")
            continue
        before = len(problems)
        tensors = _tensors_of(folder, file, problems)
        is_readable = len(problems) == before
        for name in (name for name in where if where[name] == file):
            if name in tensors:
                found[name] = tensors[name]
            elif is_readable:
                problems.add(str(folder / file), f"has no {name}, though the index says so")
    return found


def _tensors_of(folder: Path, file: str, problems: Problems) -> dict[str, Tensor]:
    try:
        check_inside(folder, file)
    except OSError as error:
        problems.add(str(folder / file), f"cannot be read: {error.strerror}")
        return {}
    return tensors_in(folder / file, problems)


def _check_num_experts(
    tensors: Mapping[str, Tensor], names: list[tuple[str, Foreign]], model: DecoderModel, problems: Problems
) -> None:
    """Reports a number of experts that differs from the config's once, not for each missing or unknown tensor."""
    patterns = [re.escape(name) for name, _ in names if EXPERT in name]
    number = re.compile("|".join(one.replace(r"\*", r"\d+").replace(r"\#", r"(\d+)") for one in patterns))
    matches = [number.fullmatch(name) for name in tensors] if patterns else []
    found = {int(match[match.lastindex or 0]) for match in matches if match}
    if model.experts and found and len(found) != model.experts.num:
        what = f"{CONFIG} has {model.experts.num}, but there are tensors of {len(found)}"
        problems.add("the number of experts", what, f"the {CONFIG} of this checkpoint")


def _expected(model: DecoderModel, names: list[tuple[str, Foreign]]) -> Iterator[tuple[str, Shape]]:
    shapes = layer_shapes(model)
    for name, foreign in names:
        for _, complete in numbered(name, foreign, model):
            yield complete, foreign.shape(shapes)


def compare(
    folder: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Shape], model: Sizes, problems: Problems
) -> None:
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
