"""Stores the projections of a model compressed: as two thin factors, as codes, or as codes of two thin factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar.config import Config, Positive
from meshpar.errors import ConfigError, Problems, suggestion
from meshpar.nn.experts.mlp import ExpertProjection
from meshpar.nn.layers import STACKED, LinearMap, Projection
from meshpar.nn.lora import projections
from meshpar.nn.quantized_kernel import STORED, Quantized, QuantizedKernel
from meshpar.parallel.precision import wide


class LowRankKernel(Config):
    """A projection whose kernel is a product of two thin matrices, `kernel[in, rank] @ expand.kernel[rank, out]`."""

    path: str
    """The path of the projection, such as `blocks.mlp.up`."""
    rank: Positive
    """The columns of the first matrix, and rows of the second."""


def store_compressed(
    model: nnx.Module, low_rank: Sequence[LowRankKernel], weights: Quantized | None, rngs: nnx.Rngs
) -> None:
    """Replaces the kernels that `low_rank` lists by factors, and then, with `weights`, all kernels by codes.

    Raises:
      ConfigError: lists the paths that name no projection of the model, or the kernels that cannot be quantized.
    """
    found = {path: one for path, one in projections(model).items() if isinstance(one, Projection)}
    problems = Problems()
    for entry in low_rank:
        if entry.path in found:
            found[entry.path].factorize(entry.rank, rngs)
        else:
            fix = suggestion(entry.path, found, f"there are {', '.join(found)}")
            problems.add("model.low_rank", f"{entry.path!r} is not a projection of the model", fix)
    problems.raise_any(ConfigError, "the model cannot be stored in factors:")
    if weights:
        _quantize(model, weights)


def _quantize(model: nnx.Module, weights: Quantized) -> None:
    maps = _maps(model)
    problems = Problems()
    if any(isinstance(one, ExpertProjection) for one in projections(model).values()):
        problems.add("model.weights", "the weights of experts cannot be stored as codes", "model.weights=null")
    for path, module in maps.items():
        weights.check(f"model.weights: {path}", module.floats.shape[module.grouped_dim], problems)
    problems.raise_any(ConfigError, "the weights cannot be stored as codes:")
    for module in maps.values():
        module.quantize(weights)


class Factors(NamedTuple):
    """The factors of a kernel.

    Args:
      rank: the smallest with which no layer exceeds the error, or a larger one that can be divided into groups.
      error: the largest relative error of a layer in the Frobenius norm, `|W - AB| / |W|`.
    """

    rank: int
    error: float
    first: np.ndarray
    second: np.ndarray


def factorize(
    module: nnx.Module, params: Mapping[str, Any], error: float, weights: Quantized | None = None
) -> dict[str, Factors]:
    """Factorizes kernels by the singular value decomposition: path -> factors, where they have fewer elements.

    Args:
      module: with arrays or abstract; its projections name the kernels.
      params: by path.
      error: the largest relative error of a layer.
      weights: how the factors are stored; ranks that cannot be divided into groups are increased.

    Numerics: float64. The rank is the smallest that keeps the error, by Eckart and Young 1936, doi:10.1007/BF02288367.
    """
    found = {}
    for path, one in projections(module).items():
        if isinstance(one, Projection) and one.expand is None:
            end = one.grouped_dim + 1
            kernel = np.asarray(params[f"{path}.kernel"], np.float64)
            factors = _factors(kernel, end - one.num_inputs, end, error, weights.fitting if weights else int)
            if factors.first.size + factors.second.size < params[f"{path}.kernel"].size:
                found[path] = factors
    return found


def _factors(kernel: np.ndarray, start: int, end: int, error: float, fitting: Callable[[int], int] = int) -> Factors:
    """Dims before `start` stack matrices, those up to `end` are inputs; `fitting` increases a rank."""
    stack = kernel.shape[:start]
    inputs = kernel.shape[start:end]
    outputs = kernel.shape[end:]
    u, s, vt = np.linalg.svd(kernel.reshape(*stack, math.prod(inputs), math.prod(outputs)), full_matrices=False)
    # left[r]: the norm of the residual of the best product of rank r.
    left = np.sqrt(np.cumsum(np.square(s)[..., ::-1], axis=-1))[..., ::-1]
    norm = np.maximum(left[..., 0], np.finfo(np.float64).tiny)
    left = np.concatenate([left, np.zeros_like(left[..., :1])], axis=-1) / norm[..., None]
    worst = left.reshape(-1, left.shape[-1]).max(0)
    rank = min(fitting(max(1, int(np.argmax(worst <= error)))), s.shape[-1])
    root = np.sqrt(s[..., :rank])
    first = u[..., :rank] * root[..., None, :]
    second = vt[..., :rank, :] * root[..., :, None]
    return Factors(
        rank, float(worst[rank]), first.reshape(*stack, *inputs, rank), second.reshape(*stack, rank, *outputs)
    )


def quantize(module: nnx.Module, params: Mapping[str, jax.Array], how: Quantized) -> dict[str, jax.Array]:
    """The parameters with codes and scales in place of the kernels of projections.

    Args:
      module: with arrays or abstract; its kernels are stored as floats.
    """
    quantized = dict(params)
    for path, one in _maps(module).items():
        stored = how.quantize(quantized.pop(f"{path}.kernel"), one.grouped_dim, one.num_inputs)
        quantized |= {f"{path}.kernel.{name}": array for name, array in stored.items()}
    return quantized


def dense(module: nnx.Module, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The parameters of the model without compression: codes are dequantized, and factors multiplied.

    Args:
      module: the compressed model, with arrays or abstract.

    Numerics: in float32 at least, then rounded to the dtype of the parameters.
    """
    plain = dequantized(module, params)
    maps = _maps(module)
    for path in [path for path in maps if path.endswith(".expand")]:
        first = f"{path.removesuffix('.expand')}.kernel"
        second = plain.pop(f"{path}.kernel")
        plain[first] = _product(plain[first], second, sum(dim in STACKED for dim in _dims(maps[path])))
    return plain


def kernels_in_codes(module: nnx.Module) -> dict[str, QuantizedKernel]:
    """The kernels of a model that are stored as codes, by path."""
    maps = {f"{path}.kernel": one.kernel for path, one in _maps(module).items()}
    return {path: kernel for path, kernel in maps.items() if isinstance(kernel, QuantizedKernel)}


def dequantized(module: nnx.Module, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The parameters with kernels in place of their codes.

    Args:
      module: the model that stores codes, with arrays or abstract.
    """
    plain = dict(params)
    for path, kernel in kernels_in_codes(module).items():
        names = [name for name in STORED if f"{path}.{name}" in plain]
        plain[path] = kernel.of({name: plain.pop(f"{path}.{name}") for name in names})
    return plain


def _product(first: jax.Array, second: jax.Array, stacked: int) -> jax.Array:
    """`first[stack.., in.., rank] @ second[stack.., rank, out..]`."""
    rank = first.shape[-1]
    rows = wide(first).reshape(*first.shape[:stacked], -1, rank)
    columns = wide(second).reshape(*second.shape[:stacked], rank, -1)
    product = jnp.matmul(rows, columns, precision="highest")
    return product.reshape(*first.shape[:-1], *second.shape[stacked + 1 :]).astype(first.dtype)


def _dims(one: LinearMap) -> tuple[str, ...]:
    return one.kernel.dims if isinstance(one.kernel, QuantizedKernel) else one.kernel.get_metadata()["dims"]


def _maps(module: nnx.Module) -> dict[str, LinearMap]:
    """The linear maps of a model by path: projections, and their second factors."""
    modules = ((".".join(map(str, path)), one) for path, one in nnx.iter_modules(module))
    return {path: one for path, one in modules if isinstance(one, LinearMap)}
