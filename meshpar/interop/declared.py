"""Reads the names of dims that Flax models declare, and applies rules to their constraints on activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from flax.core import meta
from jax.sharding import AbstractMesh

from meshpar.interop import explicit
from meshpar.parallel.context import current
from meshpar.tree import path_name

# NNX's present and earlier metadata keys for names; `dims` is meshpar's.
_KEYS = ("dims", "out_sharding", "sharding_names", "sharding")


def declared_dims(tree: Any) -> dict[str, tuple[str | None, ...]]:
    """Path -> names of dims, for parameters with names. The names of a dim over several axes are joined by `+`.

    Args:
      tree: parameters from a model's init: with Linen's boxes (`nn.with_partitioning`,
        `nn.with_logical_partitioning`, also from `nn.scan` and `nn.vmap`), or an `nnx.State`.
    """
    boxes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_box)
    named = ((path_name(path), _names(box)) for path, box in boxes)
    joined = ((path, ["+".join(x) if isinstance(x, tuple) else x for x in names or ()]) for path, names in named)
    return {path: tuple(names) for path, names in joined if names}


def changing(tree: Any) -> dict[str, str]:
    """Path -> kind of the NNX variables that the forward changes: statistics, keys, caches."""
    kinds = (nnx.BatchStat, nnx.RngState, nnx.Cache, nnx.Intermediate)
    boxes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_box)
    return {path_name(path): type(box).__name__ for path, box in boxes if isinstance(box, kinds)}


def unboxed(tree: Any) -> Any:
    """The parameters without Linen's boxes; NNX's variables stay, since `nnx.merge` needs them."""
    return jax.tree.map(lambda x: x.unbox() if isinstance(x, meta.AxisMetadata) else x, tree, is_leaf=_is_box)


def lazily(init: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    """Wraps `init` so that annotated NNX variables need no mesh when they are created."""

    def made(key: jax.Array) -> Any:
        with nnx.use_eager_sharding(False):
            return init(key)

    return made


@contextmanager
def flax_rules(axes: Mapping[str, str] | None = None) -> Iterator[None]:
    """Makes Flax's `with_logical_constraint` follow the rules of the lowering that is being traced.

    Otherwise these constraints silently do nothing. A `jax.shard_map` inside the model gets the mesh too.

    Args:
      axes: the model's name of a mesh axis -> meshpar's. Within the context, the axis has the model's name.
    """
    ctx = current()
    if ctx is None or ctx.manual:
        yield
        return
    called = {axis: name for name, axis in (axes or {}).items()}
    own = set(called.values())
    rules = []
    for dim in ctx.rules.table if ctx.mesh.size > 1 else ():
        over = (dim,) if dim in own else tuple(called.get(axis, axis) for axis in ctx.axes(dim))
        rules.append((dim, over or None))
    mesh = explicit.named(ctx.mesh, axes or {})
    with nn.logical_axis_rules(rules), jax.sharding.use_abstract_mesh(mesh), nn.intercept_methods(_without_mesh):
        yield


def _without_mesh(call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    """Hides the mesh from `DenseGeneral`, which would constrain its flattened kernel by the names of all its dims."""
    if not isinstance(context.module, nn.DenseGeneral) or jax.sharding.get_abstract_mesh().are_all_axes_explicit:
        return call(*args, **kwargs)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return call(*args, **kwargs)


def _is_box(x: Any) -> bool:
    return isinstance(x, (meta.AxisMetadata, nnx.Variable))


def _names(box: Any) -> Any:
    if isinstance(box, nnx.Variable):
        metadata = box.get_metadata()
        return next((metadata[key] for key in _KEYS if metadata.get(key)), None) or explicit.typed_dims(box.get_value())
    return getattr(box, "names", None) if isinstance(box, meta.AxisMetadata) else explicit.typed_dims(box)
