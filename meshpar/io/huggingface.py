"""A model from a folder as Hugging Face's libraries write it: `config.json`, and safetensors in one file or several."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from meshpar.config import flatten
from meshpar.errors import CheckpointError, ConfigError, Problems
from meshpar.io import architectures
from meshpar.io.folder import check_inside, read_json
from meshpar.io.safetensors import Tensor, tensors_in
from meshpar.models.contract import ModelContract
from meshpar.models.decoder import DecoderModel
from meshpar.models.foreign import Foreign, Names, Shape
from meshpar.nn.describe import describe
from meshpar.tree import flatten_with_paths

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FLOATS = ("float64", "float32", "float16", "bfloat16")
# What older versions of transformers wrote beside the parameters: masks, and what follows from the config.
BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True)
class Part:
    """Where one of our parameters lies.

    Args:
      name: of its tensor, with `*` for the number of the layer.
      shape: of one layer's, without padding of the vocabulary.
      begin: its first output in the tensor.
    """

    name: str
    foreign: Foreign
    shape: Shape
    begin: int


@dataclass(frozen=True)
class Pretrained:
    """A folder that was found whole: its config is understood, and every tensor is there, as long as it should be.

    Args:
      tensors: by name.
    """

    folder: Path
    config: dict[str, Any]
    model: DecoderModel
    tensors: Mapping[str, Tensor]

    @property
    def dtype(self) -> np.dtype:
        """That of the most elements."""
        sizes: dict[np.dtype, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + math.prod(tensor.shape)
        return max(sizes, key=lambda dtype: sizes[dtype])

    def params(self, structs: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Our parameters, each device reading its own shard; what several of a process hold is read once.

        Args:
          structs: path -> type, shape and sharding; padding, of the vocabulary or of the layers, gets zeros.

        Memory: beside the arrays a second time one of them; the largest come first.
        """
        order = sorted(structs, key=lambda path: -math.prod(structs[path].shape))
        read = {path: jax.block_until_ready(self._array(path, structs[path])) for path in order}
        return {path: read[path] for path in structs}

    def _array(self, path: str, struct: jax.ShapeDtypeStruct) -> jax.Array:
        shards: dict[Any, np.ndarray] = {}

        def shard(index: Any) -> np.ndarray:
            ranges = tuple(dim.indices(size)[:2] for dim, size in zip(index, struct.shape, strict=True))
            if ranges not in shards:
                shards[ranges] = self._shard(self._parts[path], [slice(*one) for one in ranges], struct.dtype)
            return shards[ranges]

        return jax.make_array_from_callback(struct.shape, struct.sharding, shard)

    def _shard(self, part: Part, index: list[slice], dtype: np.dtype) -> np.ndarray:
        made = np.zeros([dim.stop - dim.start for dim in index], dtype)
        layers = range(*index.pop(0).indices(self.model.num_layers)) if "*" in part.name else None
        there = [slice(dim.start, min(dim.stop, size)) for dim, size in zip(index, part.shape, strict=True)]
        into = tuple(slice(0, max(0, dim.stop - dim.start)) for dim in there)
        if any(not dim.stop for dim in into):
            return made
        if layers is None:
            made[into] = self._block(part, part.name, there)
        for place, layer in enumerate(layers or ()):
            made[place][into] = self._block(part, part.name.replace("*", str(layer)), there)
        return made

    def _block(self, part: Part, name: str, index: list[slice]) -> np.ndarray:
        """A part of one layer's parameter, in the dtype of the file."""
        num = part.foreign.inputs
        (left, right), sizes_in = _flat(index[:num], part.shape[:num])
        (first, last), sizes_out = _flat(index[num:], part.shape[num:])
        outputs, inputs = slice(part.begin + first, part.begin + last), slice(left, right)
        if not num:
            block = self.tensors[name].read(outputs)
        elif part.foreign.outputs_first:
            block = self.tensors[name].read(outputs, inputs).T
        else:
            block = self.tensors[name].read(inputs, outputs)
        # What is beyond the first of several dims that are one there is cut only now.
        rest = lambda group: [slice(None), *group[1:]][: len(group)]
        return block.reshape(*sizes_in, *sizes_out)[tuple(rest(index[:num]) + rest(index[num:]))]

    def check(self, model: ModelContract) -> None:
        """Compares with the model of a run.

        Raises:
          ConfigError: it is not one of meshpar's own; or each size that it has otherwise.
        """
        where, problems = self.folder / CONFIG, Problems()
        if not (ours := model.hugging_face()):
            raise ConfigError(f"init.from_hf: {where} describes a model of meshpar's own, and model is another")
        here, there = (flatten(architectures.canonical(one)) for one in (ours, self.model))
        for key in sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key)):
            mine, other = json.dumps(here.get(key)), json.dumps(there.get(key))
            problems.add(f"model.{key}", f"{mine} in this run, {other} in {where}", f"model.{key}={other}")
        problems.raise_any(ConfigError, "the model of init.from_hf is another one than the run's:")

    @property
    def paths(self) -> list[str]:
        """Of the parameters that are here."""
        return list(self._parts)

    @cached_property
    def _parts(self) -> dict[str, Part]:
        shapes, found = layer_shapes(self.model), {}
        for name, foreign in names_of(self.model, self.config["model_type"]).items():
            begin = 0
            for path in foreign.parts:
                found[path] = Part(name, foreign, shapes[path], begin)
                begin += math.prod(shapes[path][foreign.inputs :])
        return found


def _flat(index: list[slice], sizes: Shape) -> tuple[tuple[int, int], Shape]:
    """The range of a group of dims that are one dim there, and the sizes of what it holds of each."""
    if not index:
        return (0, 1), ()
    rest = math.prod(sizes[1:])
    return (index[0].start * rest, index[0].stop * rest), (index[0].stop - index[0].start, *sizes[1:])


def names_of(model: DecoderModel, kind: str) -> Names:
    """The names of a model's tensors: those of its architecture whose parameters it has."""
    shapes = layer_shapes(model)
    names = architectures.ARCHITECTURES[kind].names.items()
    return {name: foreign for name, foreign in names if foreign.parts[0] in shapes}


def layer_shapes(model: DecoderModel) -> dict[str, Shape]:
    """Path -> shape of a parameter, of one layer, without padding of the vocabulary."""
    plain = model.model_copy(update={"vocab_multiple": 1})
    specs = flatten_with_paths(describe(nnx.eval_shape(lambda: plain.build(nnx.Rngs(0)))))
    return {path: spec.shape[1:] if spec.dims[0] == "layers" else spec.shape for path, spec in specs.items()}


# Opening ------------------------------------------------------------------------------------------------------


def open_pretrained(folder: Path) -> Pretrained:
    """Reads the config and the headers of a folder, and no tensor.

    Raises:
      CheckpointError: lists all that is wrong with them: an unknown architecture, a file that is cut short or whose
        header lies, a tensor that is missing, too many, or of another shape than the config says.
    """
    problems = Problems()
    config = read_json(folder, CONFIG, problems)
    found = _tensors(folder, problems)
    most_layers = len(found) or architectures.LARGEST  # a layer has at least one
    model = architectures.read(config, str(folder / CONFIG), problems, most_layers) if config else None
    problems.raise_any(CheckpointError, f"{folder} cannot be imported:")
    assert model is not None
    names = names_of(model, config["model_type"])
    tensors = {_canonical(name, names): tensor for name, tensor in found.items()}
    expected = dict(_expected(model, names))
    _compare(folder, tensors, expected, model, problems)
    problems.raise_any(CheckpointError, f"{folder} does not hold what its {CONFIG} describes:")
    return Pretrained(folder, config, model, {name: tensors[name] for name in expected})


def _tensors(folder: Path, problems: Problems) -> dict[str, Tensor]:
    if os.path.lexists(folder / INDEX):
        return _indexed(folder, problems)
    if not os.path.lexists(folder / WEIGHTS):
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        fix = f"{pickles[0]} is a pickle, and those are not read: save the model as safetensors" if pickles else ""
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
        before, there = len(problems), _tensors_of(folder, file, problems)
        named = [name for name in where if where[name] == file]
        for name in named if len(problems) == before else ():
            if name not in there:
                problems.add(str(folder / file), f"has no {name}, though the index says so")
        found |= {name: there[name] for name in named if name in there}
    return found


def _tensors_of(folder: Path, file: str, problems: Problems) -> dict[str, Tensor]:
    try:
        check_inside(folder, file)
    except OSError as error:
        problems.add(str(folder / file), f"cannot be read: {error.strerror}")
        return {}
    return tensors_in(folder / file, problems)


def _canonical(name: str, names: Names) -> str:
    """The name with its model's prefix, which a checkpoint without output projection does not have."""
    prefix = next(iter(names)).partition(".")[0] + "."
    return name if name.startswith((prefix, "lm_head.")) else prefix + name


def _expected(model: DecoderModel, names: Names) -> Iterator[tuple[str, Shape]]:
    shapes = layer_shapes(model)
    for name, foreign in names.items():
        for layer in range(model.num_layers if "*" in name else 1):
            yield name.replace("*", str(layer)), foreign.shape(shapes)


def _compare(
    folder: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Shape], model: DecoderModel, problems: Problems
) -> None:
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            problems.add(name, f"is missing; {CONFIG} makes it {list(shape)}", _untied(name))
        elif tensor.shape != shape:
            of_vocabulary = model.vocab_size in shape and model.vocab_size not in tensor.shape
            fix = f"vocab_size is {model.vocab_size} there" if of_vocabulary else ""
            problems.add(name, f"is {list(tensor.shape)} in {tensor.file.name}, {CONFIG} makes it {list(shape)}", fix)
        elif tensor.dtype.name not in FLOATS:
            problems.add(name, f"is {tensor.dtype} in {tensor.file.name}, and only {', '.join(FLOATS)} are read")
    tied = {"lm_head.weight"} if model.tied else set()
    for name in tensors.keys() - expected.keys() - tied:
        if not name.endswith(BUFFERS):
            problems.add(name, f"is in {tensors[name].file.name}, but is no parameter of this model")


def _untied(name: str) -> str:
    return "or is tie_word_embeddings: true missing there?" if name == "lm_head.weight" else ""
