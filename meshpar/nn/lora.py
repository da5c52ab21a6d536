"""LoRA: trains two thin matrices, whose product is added to the frozen kernel of a projection.

Source: Hu et al. 2021, arXiv:2106.09685.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx

from meshpar.config import Config, Positive, Strings, default
from meshpar.errors import ConfigError, Problems, suggestion
from meshpar.nn.experts.mlp import ExpertProjection
from meshpar.nn.layers import STACKED, LowRank, Projection, filled, normal
from meshpar.nn.quantized_kernel import QuantizedKernel
from meshpar.parallel.local import varying_like
from meshpar.parallel.precision import wide
from meshpar.tree import map_with_path, matching

NAME = "lora"
Adapted = Projection | ExpertProjection


class LoRA(Config):
    """Trains a low-rank update of some projections, and freezes all other parameters.

    Memory: gradients and optimizer state of rank * (inputs + outputs) elements per projection.
    Communication: only the gradients of the update are reduced. Frozen parameters that are stored in shards are
      gathered before use.

    >>> LoRA(rank=4, alpha=8, paths=["blocks.attn.q", "blocks.mlp.*"]).scale
    2.0
    """

    kind: Literal["lora"] = "lora"
    rank: Positive = 8
    """The inner size of the two matrices whose product is the update."""
    alpha: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] = 16.0
    """The update is scaled by alpha / rank."""
    paths: Strings = default(("blocks.attn.*",))
    """Path globs of the projections that get an update: `blocks.attn.q`, `blocks.mlp.*`, `blocks.mlp.experts.*`."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapt(self, model: nnx.Module, rngs: nnx.Rngs) -> None:
        """Adds the two thin matrices to each projection that a glob matches.

        Raises:
          ConfigError: a glob matches no projection.
        """
        found = projections(model)
        problems = Problems()
        for glob in self.paths:
            if not matching(found, glob):
                parents = sorted({path.rpartition(".")[0] for path in found})
                fix = suggestion(glob, found, f"there are {', '.join(f'{parent}.*' for parent in parents)}")
                problems.add("lora.paths", f"{glob!r} matches no projection", fix)
        problems.raise_any(ConfigError, "LoRA adapts the projections of a model:")
        for path, projection in found.items():
            if any(matching([path], glob) for glob in self.paths):
                projection.lora = self._adapter(projection, rngs)

    def _adapter(self, projection: Adapted, rngs: nnx.Rngs) -> LowRank:
        kernel = projection.kernel
        shape = kernel.shape
        dims = kernel.dims if isinstance(kernel, QuantizedKernel) else kernel.get_metadata()["dims"]
        start = sum(dim in STACKED for dim in dims)
        end = start + projection.num_inputs
        std = math.prod(shape[start:end]) ** -0.5
        a = normal(rngs, (*shape[:end], self.rank), std, (*dims[:end], "rank"))
        b = filled(0.0, (*shape[:start], self.rank, *shape[end:]), (*dims[:start], "rank", *dims[end:]))
        return LowRank(a, b, self.scale)

    def merged(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Returns the parameters of the model without LoRA, by path, where each update is added to its kernel.

        Numerics: added in float32 at least, then rounded to the kernel's dtype.
        """
        plain = {path: array for path, array in params.items() if f".{NAME}." not in path}
        for path in [path for path in params if path.endswith(f".{NAME}.a")]:
            projection = path.removesuffix(f".{NAME}.a")
            kernel = f"{projection}.kernel"
            plain[kernel] = _add(plain[kernel], params[path], params[f"{projection}.{NAME}.b"], self.scale)
        return plain


def is_lora(path: str) -> bool:
    """Whether the parameter at this path was added by LoRA."""
    return NAME in path.split(".")


def without_lora(params: Any, _: Any = None) -> Any:
    """The parameters of the model that LoRA adapts: its updates are zero."""
    return map_with_path(lambda path, x: varying_like(jnp.zeros_like(x), x) if is_lora(path) else x, params)


def projections(model: nnx.Module) -> dict[str, Adapted]:
    """The projections of a model by path, also those of its experts."""
    modules = ((".".join(map(str, path)), module) for path, module in nnx.iter_modules(model))
    return {path: module for path, module in modules if isinstance(module, Adapted)}


def _add(kernel: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    stacked = a.ndim + b.ndim - 2 - kernel.ndim  # the number of leading dims in `STACKED`
    rank = a.shape[-1]
    rows = a.reshape(*a.shape[:stacked], -1, rank)
    columns = b.reshape(*b.shape[:stacked], rank, -1)
    product = jnp.matmul(wide(rows), wide(columns), precision="highest").reshape(kernel.shape)
    return (wide(kernel) + scale * product).astype(kernel.dtype)
