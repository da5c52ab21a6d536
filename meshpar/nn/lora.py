"""LoRA: trains two thin matrices, whose product is added to the frozen kernel of a projection; and DoRA, see `dora`.

Source: Hu et al. 2021, arXiv:2106.09685; rank-stabilized LoRA: Kalajdzievski 2023, arXiv:2312.03732.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx

from meshpar.config import Config, Positive, Strings, default
from meshpar.errors import ConfigError, Problems, suggestion
from meshpar.mesh.varying import varying_like
from meshpar.nn.dora import adapted
from meshpar.nn.experts.mlp import ExpertProjection
from meshpar.nn.layers import STACKED, Projection, filled, normal
from meshpar.nn.low_rank import LowRank
from meshpar.nn.quantized_kernel import QuantizedKernel
from meshpar.parallel.precision import wide
from meshpar.tree import map_with_path, matching

NAME = "lora"
MAGNITUDE = "magnitude"
Adapted = Projection | ExpertProjection
Alpha = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


class Size(NamedTuple):
    """The rank of one update, and what its product is multiplied by."""

    rank: int
    scale: float


class LoRA(Config):
    """Trains a low-rank update of some projections, and freezes all other parameters.

    Memory: gradients and optimizer state of rank * (inputs + outputs) elements per projection. With DoRA `outputs`
      more, and the product of each adapted projection for the backward.
    Communication: only the gradients of the update are reduced. Frozen parameters that are stored in shards are
      gathered before use.

    >>> lora = LoRA(rank=4, alpha=8, paths=["blocks.attn.q", "blocks.mlp.*"], rank_pattern={"blocks.mlp.*": 2})
    >>> lora.size("blocks.attn.q"), lora.size("blocks.mlp.up")
    (Size(rank=4, scale=2.0), Size(rank=2, scale=4.0))
    """

    kind: Literal["lora"] = "lora"
    rank: Positive = 8
    """The inner size of the two matrices whose product is the update."""
    alpha: Alpha = 16.0
    """The update is scaled by alpha / rank."""
    paths: Strings = default(("blocks.attn.*",))
    """Path globs of the projections that get an update: `blocks.attn.q`, `blocks.mlp.*`, `blocks.mlp.experts.*`."""
    rank_pattern: dict[str, Positive] = pydantic.Field(default_factory=dict)
    """Path glob -> rank. The first that matches counts, else `rank`."""
    alpha_pattern: dict[str, Alpha] = pydantic.Field(default_factory=dict)
    """Path glob -> alpha, in the same way."""
    use_rslora: bool = False
    """Whether updates are scaled by alpha / sqrt(rank) (rank-stabilized)."""
    use_dora: bool = False
    """Whether the norm of each output's weights is trained too (DoRA)."""

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    def size(self, *names: str) -> Size:
        """The rank and the scale of the projection with these names, such as its path."""
        rank = self._of_pattern(self.rank_pattern, names, self.rank)
        alpha = self._of_pattern(self.alpha_pattern, names, self.alpha)
        return Size(rank, alpha / (math.sqrt(rank) if self.use_rslora else rank))

    def alpha_of(self, rank: int, scale: float) -> float:
        """The alpha with which an update of this rank has this scale."""
        return scale * (math.sqrt(rank) if self.use_rslora else rank)

    def _of_pattern(self, pattern: Mapping[str, Any], names: Iterable[str], otherwise: Any) -> Any:
        return next((value for glob, value in pattern.items() if matching(names, glob)), otherwise)

    def check(self, names: Mapping[str, Iterable[str]], what: str, fix: str, problems: Problems) -> list[str]:
        """The projections that get an update. Adds each glob that matches none.

        Args:
          names: path of each projection of a model -> the names that a glob may match.
          what: the kind of thing that a glob of `paths` must match.
          fix: what to do about one, if no path is similar.
        """
        for glob in self.paths:
            if not any(matching(own, glob) for own in names.values()):
                problems.add("lora.paths", f"{glob!r} matches no {what}", suggestion(glob, names, fix))
        found = [path for path, own in names.items() if any(matching(own, glob) for glob in self.paths)]
        for key in ("rank_pattern", "alpha_pattern"):
            for glob in getattr(self, key):
                if not any(matching(names[path], glob) for path in found):
                    what = f"{glob!r} matches none of the projections that `lora.paths` adapts"
                    is_known = any(matching(own, glob) for own in names.values())
                    near = "add it to lora.paths" if is_known else suggestion(glob, found, "leave it out")
                    problems.add(f"lora.{key}", what, near)
        return found

    def adapt(self, model: nnx.Module, rngs: nnx.Rngs) -> None:
        """Adds the thin matrices to each projection that a glob matches, and with DoRA the change of its magnitudes.

        Raises:
          ConfigError: a glob matches no projection, or DoRA is asked for where it is not computed.
        """
        found = projections(model)
        problems = Problems()
        parents = sorted({path.rpartition(".")[0] for path in found})
        fix = f"there are {', '.join(f'{parent}.*' for parent in parents)}"
        paths = self.check({path: (path,) for path in found}, "projection", fix, problems)
        if self.use_dora and (without := [path for path in paths if not _has_dora(found[path])]):
            what = f"{', '.join(without)}: kernels of experts, and factors of a kernel, are adapted without magnitudes"
            problems.add("lora.use_dora", what, "lora.use_dora=false, or other lora.paths")
        problems.raise_any(ConfigError, "LoRA adapts the projections of a model:")
        for path in paths:
            found[path].lora = self._adapter(found[path], self.size(path), rngs)

    def _adapter(self, projection: Adapted, size: Size, rngs: nnx.Rngs) -> LowRank:
        kernel = projection.kernel
        shape = kernel.shape
        dims = kernel.dims if isinstance(kernel, QuantizedKernel) else kernel.get_metadata()["dims"]
        start = sum(dim in STACKED for dim in dims)
        end = start + projection.num_inputs
        std = math.prod(shape[start:end]) ** -0.5
        a = normal(rngs, (*shape[:end], size.rank), std, (*dims[:end], "rank"))
        b = filled(0.0, (*shape[:start], size.rank, *shape[end:]), (*dims[:start], "rank", *dims[end:]))
        of_outputs = ((*shape[:start], *shape[end:]), (*dims[:start], *dims[end:]))
        return LowRank(a, b, size.scale, filled(0.0, *of_outputs) if self.use_dora else None)

    def merged(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Returns the parameters of the model without LoRA, by path, where each update is added to its kernel.

        Numerics: added in float32 at least, then rounded to the kernel's dtype.
        """
        plain = {path: array for path, array in params.items() if f".{NAME}." not in path}
        for path in [path for path in params if path.endswith(f".{NAME}.a")]:
            projection = path.removesuffix(f".{NAME}.a")
            kernel = f"{projection}.kernel"
            b, magnitude = (params.get(f"{projection}.{NAME}.{name}") for name in ("b", MAGNITUDE))
            plain[kernel] = _add(plain[kernel], params[path], b, self.size(projection).scale, magnitude)
        return plain


def inputs_of(kernel: jax.Array, a: jax.Array, b: jax.Array) -> tuple[int, ...]:
    """The indices of a kernel's input dims. Those before them stack matrices, see `STACKED`."""
    return tuple(range(a.ndim + b.ndim - 2 - kernel.ndim, a.ndim - 1))


def is_lora(path: str) -> bool:
    """Whether the parameter at this path was added by LoRA."""
    return NAME in path.split(".")


def without_lora(params: Any, _: Any = None) -> Any:
    """The parameters of the model that LoRA adapts: its updates are zero, and so are the changes of magnitudes."""
    return map_with_path(lambda path, x: varying_like(jnp.zeros_like(x), x) if is_lora(path) else x, params)


def projections(model: nnx.Module) -> dict[str, Adapted]:
    """The projections of a model by path, also those of its experts."""
    modules = ((".".join(map(str, path)), module) for path, module in nnx.iter_modules(model))
    return {path: module for path, module in modules if isinstance(module, Adapted)}


def _has_dora(projection: Adapted) -> bool:
    return isinstance(projection, Projection) and projection.expand is None


def _add(kernel: jax.Array, a: jax.Array, b: Any, scale: float, magnitude: jax.Array | None) -> jax.Array:
    inputs = inputs_of(kernel, a, b)
    stacked = inputs[0]
    rank = a.shape[-1]
    rows = a.reshape(*a.shape[:stacked], -1, rank)
    columns = b.reshape(*b.shape[:stacked], rank, -1)
    product = jnp.matmul(wide(rows), wide(columns), precision="highest").reshape(kernel.shape)
    return adapted(kernel, scale * product, magnitude, inputs).astype(kernel.dtype)
