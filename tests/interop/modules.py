"""Reads a folder of a family or of an encoder into its module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import SingleDeviceSharding

from meshpar.interop.family_model import FamilyPretrained
from meshpar.interop.layout import VALUE, Options, module_of, shapes_of
from meshpar.interop.open_folder import open_folder


def opened(folder: Path) -> tuple[Any, dict[str, jax.Array]]:
    """The folder, and its parameters on one device."""
    pretrained: Any = open_folder(folder)
    assert isinstance(pretrained, FamilyPretrained)
    here = SingleDeviceSharding(jax.devices()[0])
    shapes = shapes_of(pretrained.model.options)
    structs = {path: jax.ShapeDtypeStruct(x, pretrained.dtype, sharding=here) for path, x in shapes.items()}
    return pretrained, pretrained.params(structs)


def built(options: Options, params: dict[str, jax.Array]) -> Any:
    """The module of a model's options with these parameters."""
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(nnx.eval_shape(lambda: module_of(options)(rngs=nnx.Rngs(0))))
    filled = [(path, x.replace(params[".".join(map(str, path)) + VALUE])) for path, x in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(filled))
