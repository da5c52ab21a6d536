"""The tensors of a family's folder, and the parameters that they are: reading, comparing and writing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from meshpar.interop.export import tensor_of
from meshpar.interop.safetensors import Tensor, Written
from meshpar.models.encoders.family import EncoderFamily, Stored
from meshpar.models.encoders.model import encoder
from meshpar.models.encoders.options import EncoderOptions, TwoTowers
from meshpar.models.families.decoder import FamilyDecoder
from meshpar.models.families.family import Exact, Family
from meshpar.models.families.options import DecoderOptions
from meshpar.models.foreign import EXPERT, LAYER, Foreign, Shape
from meshpar.tree import flatten_with_paths

Options = DecoderOptions | EncoderOptions | TwoTowers
STACKED = f"[{EXPERT}]"
"""The end of a name whose tensor has the index of `#` as its first dim."""


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of a folder, of one layer.

    Args:
      name: with `#` for the index along the first dim of its parameters, if there is one tensor for each.
      count: how many indices there are; None if the parameters have no such dim.
    """

    name: str
    foreign: Foreign
    count: int | None

    @property
    def is_stacked(self) -> bool:
        return self.name.endswith(STACKED)

    def numbered(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """The place in the parameters, and the complete name."""
        if self.count is None:
            yield (), self.name
        for index in range(self.count or 0):
            yield (index,), self.name.replace(EXPERT, str(index))


def module_of(options: Options) -> Any:
    """A function with an argument `rngs` that returns the module of a model's options."""
    return partial(FamilyDecoder if isinstance(options, DecoderOptions) else encoder, options)  # pyright: ignore


@cache
def shapes_of(options: Options) -> Mapping[str, Shape]:
    """Path -> shape of each parameter."""
    with nnx.use_eager_sharding(False):
        state = nnx.eval_shape(lambda: nnx.state(module_of(options)(rngs=nnx.Rngs(0)), nnx.Param))
    return {path.removesuffix(".value"): struct.shape for path, struct in flatten_with_paths(state).items()}


def places_of(options: Options, family: Family | EncoderFamily) -> list[TensorPlace]:
    """The tensors of a model, in the order of its layers."""
    shapes = shapes_of(options)
    found: list[TensorPlace] = []
    for name, foreign in family.names_of(options).items():  # pyright: ignore[reportArgumentType]
        for layer in range(len(options.layers)) if LAYER in name else (0,):
            parts = tuple(path.replace(LAYER, str(layer)) for path in foreign.parts)
            if parts[0] in shapes:
                count = shapes[parts[0]][0] if EXPERT in name else None
                found.append(TensorPlace(name.replace(LAYER, str(layer)), replace(foreign, parts=parts), count))
    return found


def shapes_in(place: TensorPlace, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The shapes of the parameters of a tensor, without the dim that `#` counts."""
    return {part: shapes[part][0 if place.count is None else 1 :] for part in place.foreign.parts}


def split(tensors: Mapping[str, Tensor], places: list[TensorPlace]) -> dict[str, Tensor]:
    """The tensors with one for each index of a stacked one, and with vectors of one dim, as `Foreign` knows them."""
    found = dict(tensors)
    for place in places:
        base = place.name.removesuffix(STACKED)
        if place.is_stacked and base in found and len(found[base].shape) > 1:
            found |= _parts(base, found.pop(base))
        elif isinstance(place.foreign, Exact) and base in found:
            found[base] = replace(found[base], shape=(math.prod(found[base].shape),))
        elif isinstance(place.foreign, Stored) and base in found and found[base].shape == place.foreign.dims:
            found[base] = replace(found[base], shape=place.foreign.flat)
    return found


def _parts(base: str, whole: Tensor) -> dict[str, Tensor]:
    num, *rest = whole.shape
    size = math.prod(rest) * whole.dtype.itemsize
    return {f"{base}[{i}]": replace(whole, shape=(*rest,), begin=whole.begin + i * size) for i in range(num)}


def expected(options: Options, places: list[TensorPlace]) -> dict[str, Shape]:
    """Name -> shape of each tensor, as `split` gives them."""
    shapes = shapes_of(options)
    return {
        name: Foreign.shape(place.foreign, shapes_in(place, shapes)) for place in places for _, name in place.numbered()
    }


def written(
    options: Options, family: Family | EncoderFamily, params: Mapping[str, jax.Array], dtype: np.dtype
) -> Iterator[Written]:
    """The tensors of a folder, made one at a time."""
    shapes = shapes_of(options)
    for place in places_of(options, family):
        inner = shapes_in(place, shapes)
        make = partial(tensor_of, place.foreign, inner, params)
        if place.is_stacked:
            assert place.count is not None
            whole = (place.count, *place.foreign.shape(inner))
            yield Written(place.name.removesuffix(STACKED), dtype, whole, partial(_stacked, make, place.count))
            continue
        for index, name in place.numbered():
            shape = place.foreign.shape(inner)
            yield Written(name, dtype, shape, lambda make=make, index=index, shape=shape: make(index).reshape(shape))


def _stacked(make: Any, count: int) -> np.ndarray:
    return np.stack([make((index,)) for index in range(count)])
