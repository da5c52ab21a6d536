"""LoRA for any model: the loss sees kernels to which their low-rank updates are added.

    kernel[..., inputs, outputs] + alpha / rank * a[..., inputs, rank] @ b[..., rank, outputs]

With DoRA its outputs get the norms `magnitude[..., outputs]` besides, see `nn.dora`.

Which dims are inputs, outputs or stacked layers follows from the use of a kernel in the loss, see `optim.uses`. The
matrices of `name.kernel` are the parameters `name.lora.kernel.a` and `.b`, with the names of the kernel's dims. So they
are sharded like the kernel, and a checkpoint of the model without LoRA has the same paths.

Memory: the gradients of the merged kernels, one after another. In the manual lowering a loop over layers merges one
layer at a time (`partition.in_loops`); under GSPMD the merged kernels of all layers are held.

Source: Hu et al. 2021, arXiv:2106.09685.
"""

from __future__ import annotations

import math
import string
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.errors import ConfigError, Problems
from meshpar.nn import dora
from meshpar.nn.lora import MAGNITUDE, NAME, LoRA, Size
from meshpar.optim.base import Matrix
from meshpar.parallel.precision import wide
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.tree import flatten_with_paths, path_name

Keys = tuple[Any, ...]
"""The keys that lead to a leaf of nested mappings."""
RANK = "rank"
"""The name of the inner dim of an update."""


@dataclass(frozen=True)
class _Kernel:
    """A kernel with an update.

    Args:
      keys: where it is in the parameters.
      spec: of the kernel.
      matrix: which of its dims are inputs and outputs; the others stack.
      size: the rank and the scale of its update.
      has_magnitude: whether it is adapted by DoRA.
    """

    keys: Keys
    spec: ArraySpec
    matrix: Matrix
    size: Size
    has_magnitude: bool

    @property
    def equation(self) -> str:
        """The product of the two matrices, whose dims are in the kernel's order."""
        letters = string.ascii_lowercase[: len(self.spec.shape)]
        stacked = self._stacked
        a, b = ("".join(letters[i] for i in dims) for dims in (stacked + self.matrix.inputs, self.matrix.outputs))
        return f"{a}R,{''.join(letters[i] for i in stacked)}R{b}->{letters}"

    @property
    def specs(self) -> dict[str, ArraySpec]:
        """The specs of the two matrices, and of DoRA's magnitudes."""
        matrices = {
            "a": self._spec(self._stacked + self.matrix.inputs, len(self._stacked + self.matrix.inputs)),
            "b": self._spec(self._stacked + self.matrix.outputs, len(self._stacked)),
        }
        return matrices | ({MAGNITUDE: self._of_outputs} if self.has_magnitude else {})

    @property
    def kinds(self) -> dict[str, Matrix]:
        """How these are used."""
        first = len(self._stacked)
        num_inputs, num_outputs = len(self.matrix.inputs), len(self.matrix.outputs)
        matrices = {
            "a": Matrix(tuple(range(first, first + num_inputs)), (first + num_inputs,)),
            "b": Matrix((first,), tuple(range(first + 1, first + 1 + num_outputs))),
        }
        return matrices | ({MAGNITUDE: self._vectors} if self.has_magnitude else {})

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Their first values: `a` is random and the others zero, so that the first update is zero."""
        zeros = {name: jnp.zeros(spec.shape, spec.dtype) for name, spec in self.specs.items() if name != "a"}
        std = math.prod(self.spec.shape[i] for i in self.matrix.inputs) ** -0.5
        key = jax.random.fold_in(key, zlib.crc32(repr(self.keys).encode()))
        of_a = self.specs["a"]
        return {"a": std * jax.random.normal(key, of_a.shape, of_a.dtype)} | zeros

    def adapted(self, kernel: jax.Array, update: Mapping[str, jax.Array]) -> jax.Array:
        """The kernel with its update."""
        product = jnp.einsum(self.equation, wide(update["a"]), wide(update["b"]), precision="highest")
        inputs = tuple(sorted(self.matrix.inputs))
        return dora.adapted(kernel, self.size.scale * product, update.get(MAGNITUDE), inputs).astype(kernel.dtype)

    @property
    def _stacked(self) -> tuple[int, ...]:
        multiplied = self.matrix.inputs + self.matrix.outputs
        return tuple(i for i in range(len(self.spec.shape)) if i not in multiplied)

    @property
    def _of_outputs(self) -> ArraySpec:
        """The spec of an array with a number for each output, in the order of the kernel's dims."""
        shape, dims = self.spec.shape, self.spec.dims
        return ArraySpec(tuple(shape[i] for i in self._kept), self.spec.dtype, tuple(dims[i] for i in self._kept))

    @property
    def _vectors(self) -> Matrix:
        """How such an array is used: as vectors."""
        return Matrix(tuple(place for place, i in enumerate(self._kept) if i in self.matrix.outputs), ())

    @property
    def _kept(self) -> tuple[int, ...]:
        return tuple(i for i in range(len(self.spec.shape)) if i not in self.matrix.inputs)

    def _spec(self, dims: Sequence[int], place: int) -> ArraySpec:
        rank = self.size.rank
        shape = [self.spec.shape[i] for i in dims]
        names = [self.spec.dims[i] for i in dims]
        return ArraySpec(
            (*shape[:place], rank, *shape[place:]), self.spec.dtype, (*names[:place], RANK, *names[place:])
        )


@dataclass(frozen=True)
class Adapters:
    """The low-rank updates of some kernels of a model."""

    kernels: tuple[_Kernel, ...]

    @classmethod
    def of(cls, lora: LoRA, specs: Any, kinds: Any) -> Adapters:
        """The updates of the kernels that a glob of `lora.paths` matches, by its path or by its module's.

        Args:
          specs, kinds: trees of `ArraySpec` and of `Matrix`.

        Raises:
          ConfigError: a glob matches no kernel, or the parameters are not nested mappings.
        """
        flat = jax.tree_util.tree_leaves_with_path(specs)
        found = {
            path_name(path).removesuffix(".value"): (path, spec, matrix)
            for (path, spec), matrix in zip(flat, jax.tree.leaves(kinds), strict=True)
            if matrix.inputs and matrix.outputs
        }
        named = {name: {name, name.rpartition(".")[0]} for name in found}
        problems = Problems()
        kernels = []
        fix = f"there are {', '.join(sorted(found)[:6])}"
        for name in lora.check(named, "parameter that is multiplied as a matrix", fix, problems):
            path, spec, matrix = found[name]
            if not _is_nested(specs, _keys(path)):
                what = "it is in a tuple or a list, which cannot hold its update"
                problems.add(f"lora.paths: {name}", what, "parameters in nested dicts, or in an nnx.State")
            kernels.append(_Kernel(_keys(path), spec, matrix, lora.size(*named[name]), lora.use_dora))
        problems.raise_any(ConfigError, "LoRA adapts the kernels of a model:")
        return cls(tuple(kernels))

    def specs(self, specs: Any) -> Any:
        """The specs of the parameters, with those of the updates."""
        return _joined(specs, {kernel.keys: kernel.specs for kernel in self.kernels})

    def kinds(self, kinds: Any) -> Any:
        """The same of a tree of `Matrix`, in which each update's matrices multiply too."""
        return _joined(kinds, {kernel.keys: kernel.kinds for kernel in self.kernels})

    def init(self, init: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
        """An init of the model's parameters as one of these and of the updates."""

        def with_updates(key: jax.Array) -> Any:
            updates = {kernel.keys: kernel.init(key) for kernel in self.kernels}
            return _joined(init(key), updates)

        return with_updates

    def loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """A loss of the model's parameters as one of these and of the updates."""

        def of_merged(params: Any, *others: Any) -> Any:
            return loss(self.merged(params), *others)

        return of_merged

    def merged(self, params: Any) -> Any:
        """The parameters of the model, with each update added to its kernel.

        Numerics: added in float32 at least, then rounded to the kernel's dtype.
        """
        plain, updates = _split(params, {kernel.keys for kernel in self.kernels})
        for kernel in self.kernels:
            adapted = partial(kernel.adapted, update=updates[kernel.keys])
            plain = _changed(plain, kernel.keys, partial(jax.tree.map, adapted))  # also in the variable of NNX
        return plain

    def merged_by_path(self, params: Any) -> dict[str, jax.Array]:
        """`merged`, by path."""
        return flatten_with_paths(self.merged(params))


def with_rank(rules: AxisRules) -> AxisRules:
    """The rules, with one for the inner dim of the updates: it is whole, unless a rule says otherwise."""
    return rules if RANK in rules.table else rules | AxisRules(rank=())


def _keys(path: Sequence[Any]) -> Keys:
    """The keys of a leaf, without the attribute in which an NNX variable has its array."""
    return tuple(key.key for key in path if hasattr(key, "key"))


def _is_nested(tree: Any, keys: Keys) -> bool:
    for key in keys:
        if not isinstance(tree, Mapping):
            return False
        tree = tree[key]
    return bool(keys) and len(jax.tree.leaves(tree)) == 1


def _joined(tree: Any, updates: Mapping[Keys, Any]) -> Any:
    """Nested mappings with `lora.NAME` beside each NAME that has an update."""
    own = {keys[0]: update for keys, update in updates.items() if len(keys) == 1}
    inner = {name: _joined(child, below) if (below := _below(name, updates)) else child for name, child in tree.items()}
    return type(tree)(inner | ({NAME: own} if own else {}))


def _split(tree: Any, all_keys: Collection[Keys]) -> tuple[Any, dict[Keys, Any]]:
    """What `_joined` joined."""
    updates = {keys: tree[NAME][keys[0]] for keys in all_keys if len(keys) == 1}
    plain = {}
    for name, child in tree.items():
        if name == NAME and updates:
            continue
        below = _below(name, dict.fromkeys(all_keys))
        plain[name], more = _split(child, below) if below else (child, {})
        updates |= {(name, *keys): update for keys, update in more.items()}
    return type(tree)(plain), updates


def _below(name: Any, updates: Mapping[Keys, Any]) -> dict[Keys, Any]:
    return {keys[1:]: update for keys, update in updates.items() if len(keys) > 1 and keys[0] == name}


def _changed(tree: Any, keys: Keys, change: Callable[[Any], Any]) -> Any:
    if not keys:
        return change(tree)
    return type(tree)({**tree, keys[0]: _changed(tree[keys[0]], keys[1:], change)})
