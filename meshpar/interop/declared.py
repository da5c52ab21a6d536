"""What Flax models declare: names of dims in Linen's boxes and NNX's variables, and constraints on activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from flax.core import meta
from jax.sharding import AbstractMesh, Mesh

from meshpar.sharding.constrain import current
from meshpar.sharding.resolve import AnyMesh
from meshpar.tree import path_name

# NNX's key for names, and those that it had before; `dims` is meshpar's own.
_KEYS = ("dims", "out_sharding", "sharding_names", "sharding")


def declared_dims(tree: Any) -> dict[str, tuple[str | None, ...]]:
    """Path -> names of dims, of the parameters that carry any.

    Args:
      tree: parameters as a model's init makes them: with Linen's boxes (`nn.with_partitioning`,
        `nn.with_logical_partitioning`, and what `nn.scan` and `nn.vmap` add), or an `nnx.State`.
    """
    boxes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_box)
    named = ((path_name(path), _names(box)) for path, box in boxes)
    return {path: tuple(map(_joined, names)) for path, names in named if names}


def changing(tree: Any) -> dict[str, str]:
    """Path -> kind, of the NNX variables that no optimizer changes, but the forward: statistics, keys, caches."""
    kinds = (nnx.BatchStat, nnx.RngState, nnx.Cache, nnx.Intermediate)
    boxes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_box)
    return {path_name(path): type(box).__name__ for path, box in boxes if isinstance(box, kinds)}


def unboxed(tree: Any) -> Any:
    """The same parameters without Linen's boxes; NNX's variables stay, for `nnx.merge` wants them."""
    return jax.tree.map(lambda x: x.unbox() if isinstance(x, meta.AxisMetadata) else x, tree, is_leaf=_is_box)


def lazily(init: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    """`init`, whose annotated NNX variables do not ask for a mesh when they are made."""

    def made(key: jax.Array) -> Any:
        with nnx.use_eager_sharding(False):
            return init(key)

    return made


@contextmanager
def flax_rules(axes: Mapping[str, str] | None = None) -> Iterator[None]:
    """Within, Flax's `with_logical_constraint` follows the rules of the lowering that is being traced.

    Without it they would do nothing, and say nothing. A `jax.shard_map` of the model's own finds the mesh.

    Args:
      axes: the model's name of a mesh axis -> meshpar's. Within, the axis has the model's name.
    """
    how = current()
    if how is None or how.manual:
        yield
        return
    called = {axis: name for name, axis in (axes or {}).items()}
    own = set(called.values())
    rules = []
    for dim in how.rules.table if how.mesh.size > 1 else ():
        over = (dim,) if dim in own else tuple(called.get(axis, axis) for axis in how.axes(dim))
        rules.append((dim, over or None))
    mesh = _abstract(how.mesh)
    names = tuple(called.get(axis, axis) for axis in map(str, mesh.axis_names))
    renamed = AbstractMesh(mesh.axis_sizes, names, axis_types=mesh.axis_types) if called else mesh
    with nn.logical_axis_rules(rules), jax.sharding.use_abstract_mesh(renamed), nn.intercept_methods(_without_mesh):
        yield


def _without_mesh(call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    """Flax's `DenseGeneral` draws a kernel of two dims, and under a mesh would constrain it by the names of all."""
    if not isinstance(context.module, nn.DenseGeneral):
        return call(*args, **kwargs)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return call(*args, **kwargs)


def _abstract(mesh: AnyMesh) -> AbstractMesh:
    return mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh


def _is_box(x: Any) -> bool:
    return isinstance(x, (meta.AxisMetadata, nnx.Variable))


def _joined(name: Any) -> str | None:
    """A dim that is sharded over several axes, as a `PartitionSpec` may say, has their names joined."""
    return "+".join(name) if isinstance(name, tuple) else name


def _names(box: Any) -> Any:
    if isinstance(box, nnx.Variable):
        found = box.get_metadata()
        return next((found[key] for key in _KEYS if found.get(key)), None)
    return getattr(box, "names", None)
