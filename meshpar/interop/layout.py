"""Where the parameters of a model are in the tensors of a Hugging Face folder: for reading, writing and adapters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import groupby
from typing import Any

import jax
import numpy as np
from flax import nnx

from meshpar.interop.architectures import ARCHITECTURES
from meshpar.interop.safetensors import Tensor, Written
from meshpar.models.decoder import DecoderModel
from meshpar.models.encoders.family import EncoderFamily, Stored
from meshpar.models.encoders.model import encoder
from meshpar.models.encoders.options import EncoderOptions, TwoTowers
from meshpar.models.families.decoder import FamilyDecoder
from meshpar.models.families.family import Exact, Family
from meshpar.models.families.options import DecoderOptions
from meshpar.models.foreign import EXPERT, LAYER, Foreign, Shape
from meshpar.nn.describe import describe
from meshpar.nn.transformer import BLOCKS, DENSE_BLOCKS
from meshpar.tree import flatten_with_paths

Options = DecoderOptions | EncoderOptions | TwoTowers
Index = tuple[int, ...]
VALUE = ".value"
"""The end of the path of a variable of NNX."""


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of a folder, and its place in the parameters.

    Args:
      name: complete. It ends with `[i]` for the part `i` of a tensor that holds the same of all experts.
      foreign: with the paths of the parameters.
      index: of the layer and of the expert in the leading dims of the parameters, if these are stacked.
      is_of_expert: whether it belongs to one of several experts.
    """

    name: str
    foreign: Foreign
    index: Index = ()
    is_of_expert: bool = False

    @property
    def in_file(self) -> str:
        """The name of the tensor in the file."""
        return self.name.partition("[")[0]


@dataclass(frozen=True)
class TensorPart:
    """The place of one of our parameters in a tensor.

    Args:
      begin: index of the parameter's first output in the tensor.
    """

    name: str
    foreign: Foreign
    begin: int


@dataclass(frozen=True)
class Layout:
    """The tensors of a model, in the order in which they are written.

    Args:
      shapes: path -> shape of a parameter, of one layer and expert, without padding of the vocabulary.
      prefixes: the first parts of the names; that of the embedding first.
    """

    places: tuple[TensorPlace, ...]
    shapes: Mapping[str, Shape]
    prefixes: tuple[str, ...]

    @cached_property
    def parts(self) -> dict[str, dict[Index, TensorPart]]:
        """Path -> the part of a tensor at each index of the leading dims."""
        found: dict[str, dict[Index, TensorPart]] = {}
        for place in self.places:
            begin = 0
            for path in place.foreign.parts:
                found.setdefault(path, {})[place.index] = TensorPart(place.name, place.foreign, begin)
                begin += math.prod(self.shapes[path][place.foreign.inputs :])
        return found

    @cached_property
    def expected(self) -> dict[str, Shape]:
        """Name -> shape of each tensor, as `flat` gives them."""
        return {place.name: Foreign.shape(place.foreign, self.shapes) for place in self.places}

    @cached_property
    def sizes(self) -> dict[str, Shape]:
        """Name -> shape of each tensor; of a matrix (out, in)."""
        return {name: shape[::-1] if name in self.transposed else shape for name, shape in self.expected.items()}

    @cached_property
    def transposed(self) -> set[str]:
        """The names of the matrices that are stored as [in, out]."""
        return {one.name for one in self.places if one.foreign.inputs and not one.foreign.outputs_first}

    def without(self, prefix: str) -> Layout:
        """The same tensors by names that lose a beginning."""
        return replace(self, places=tuple(replace(one, name=one.name.removeprefix(prefix)) for one in self.places))

    def complete(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors by complete names: files of a model without an output projection leave out the first prefix."""
        first, *_ = self.prefixes
        known = (*self.prefixes, "lm_head.")
        return {name if name.startswith(known) else first + name: tensor for name, tensor in tensors.items()}

    def flat(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors with one for each expert of a stacked one, and with the dims that `Foreign` knows."""
        found = dict(tensors)
        for place in self.places:
            base = place.in_file
            if base not in found:
                continue
            tensor = found[base]
            if place.name != base and len(tensor.shape) > 1:
                found |= _unstacked(base, found.pop(base))
            elif isinstance(place.foreign, Exact):
                found[base] = replace(tensor, shape=(math.prod(tensor.shape),))
            elif isinstance(place.foreign, Stored) and tensor.shape == place.foreign.dims:
                found[base] = replace(tensor, shape=place.foreign.flat)
        return found

    def written(self, params: Mapping[str, jax.Array], dtype: np.dtype) -> Iterator[Written]:
        """The tensors of a folder, each made when it is written."""
        for name, group in groupby(self.places, key=lambda place: place.in_file):
            first, *others = group
            make, shape = partial(self._tensor, params), first.foreign.shape(self.shapes)
            if first.name == name:
                yield Written(name, dtype, shape, partial(make, first))
            else:
                every = [first, *others]
                yield Written(name, dtype, (len(every), *shape), lambda e=every, m=make: np.stack([*map(m, e)]))

    def _tensor(self, params: Mapping[str, jax.Array], place: TensorPlace) -> np.ndarray:
        parts: list[np.ndarray] = []
        foreign = place.foreign
        for path in foreign.parts:
            shape = self.shapes[path]
            without_padding = tuple(slice(0, size) for size in shape)
            part = np.asarray(jax.device_get(params[path][place.index]))[without_padding]
            size_in = math.prod(shape[: foreign.inputs])
            parts.append(part.reshape(size_in, -1) if foreign.inputs else part.reshape(-1))
        tensor = np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        return (tensor.T if foreign.outputs_first else tensor).reshape(foreign.shape(self.shapes))


def _unstacked(base: str, whole: Tensor) -> dict[str, Tensor]:
    num, *rest = whole.shape
    size = math.prod(rest) * whole.dtype.itemsize
    return {f"{base}[{i}]": replace(whole, shape=(*rest,), begin=whole.begin + i * size) for i in range(num)}


def prefixes_in(names: Mapping[str, Foreign]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{name.partition('.')[0]}." for name in names))


# meshpar's own decoders ----------------------------------------------------------------------------------------


def decoder_layout(model: DecoderModel, kind: str) -> Layout:
    """The tensors of an architecture of Hugging Face, for the parameters that one of meshpar's decoders has.

    A name of the architecture occurs once for each stack of layers that has its parameters.
    """
    shapes, names = layer_shapes(model), ARCHITECTURES[kind].names
    places: list[TensorPlace] = []
    for name, foreign in names.items():
        for stack in (BLOCKS, DENSE_BLOCKS) if LAYER in name else (BLOCKS,):
            parts = tuple(_in_stack(path, stack) for path in foreign.parts)
            if parts[0] in shapes:
                places += _of_stack(name, replace(foreign, parts=parts), stack, model)
    return Layout(tuple(places), shapes, prefixes_in(names))


def _in_stack(path: str, stack: str) -> str:
    prefix = f"{BLOCKS}."
    return f"{stack}.{path.removeprefix(prefix)}" if path.startswith(prefix) else path


def _of_stack(name: str, foreign: Foreign, stack: str, model: DecoderModel) -> Iterator[TensorPlace]:
    """The tensors of a name, one for each layer of a stack, and expert."""
    numbers = {LAYER: [*model.layers_in(stack)], EXPERT: [*range(model.experts.num if model.experts else 0)]}
    marks = [mark for mark in numbers if mark in name]
    for index in np.ndindex(*(len(numbers[mark]) for mark in marks)):
        complete = name
        for mark, i in zip(marks, index, strict=True):
            complete = complete.replace(mark, str(numbers[mark][i]))
        yield TensorPlace(complete, foreign, index, EXPERT in name)


def layer_shapes(model: DecoderModel) -> dict[str, Shape]:
    """Path -> shape of a parameter, of one layer and one expert, without padding of the vocabulary."""
    plain = model.model_copy(update={"pad_vocab_to_multiple": 1})
    specs = flatten_with_paths(describe(plain.abstract()))
    return {path: spec.shape[sum(dim in _NUMBERED for dim in spec.dims[:2]) :] for path, spec in specs.items()}


_NUMBERED = ("layers", "experts")
"""The leading dims of our parameters. Hugging Face stores a tensor for each index along them."""


# Families and encoders -----------------------------------------------------------------------------------------


def module_of(options: Options) -> Any:
    """A function with an argument `rngs` that returns the module of a model's options."""
    return partial(FamilyDecoder if isinstance(options, DecoderOptions) else encoder, options)  # pyright: ignore


@cache
def shapes_of(options: Options) -> Mapping[str, Shape]:
    """Path -> shape of each parameter."""
    with nnx.use_eager_sharding(False):
        state = nnx.eval_shape(lambda: nnx.state(module_of(options)(rngs=nnx.Rngs(0)), nnx.Param))
    return {path: struct.shape for path, struct in flatten_with_paths(state).items()}


def module_layout(options: Options, family: Family | EncoderFamily) -> Layout:
    """The tensors of a family's model. The parameters of its layers are apart, and those of its experts stacked."""
    shapes, names = shapes_of(options), family.names_of(options)  # pyright: ignore[reportArgumentType]
    places: list[TensorPlace] = []
    inner = dict(shapes)
    for name, foreign in names.items():
        for layer in range(len(options.layers)) if LAYER in name else (0,):
            parts = tuple(path.replace(LAYER, str(layer)) + VALUE for path in foreign.parts)
            if parts[0] not in shapes:
                continue
            here, one = name.replace(LAYER, str(layer)), replace(foreign, parts=parts)
            if EXPERT not in name:
                places.append(TensorPlace(here, one))
                continue
            inner |= {part: shapes[part][1:] for part in parts}
            count = range(shapes[parts[0]][0])
            places += [TensorPlace(here.replace(EXPERT, str(i)), one, (i,), True) for i in count]
    return Layout(tuple(places), inner, prefixes_in(names))
