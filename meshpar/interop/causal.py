"""A user's own causal model, as generation needs it: its logits, and its cache if it has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar.errors import ConfigError
from meshpar.interop import explicit, undeclared
from meshpar.interop.declared import declared_dims, flax_rules, lazily, unboxed
from meshpar.interop.losses import explained
from meshpar.interop.modes import mode
from meshpar.sharding.spec import ArraySpec

Apply = Callable[[Any, jax.Array], jax.Array]
"""(params, int32[batch, seq] tokens) -> [batch, seq, vocab], the logits after each token."""


class Decoding(Protocol):
    """How a model decodes with a cache, one token at a time."""

    def init_cache(self, params: Any, batch_size: int, length: int) -> Any:
        """An empty cache for rows of up to `length` tokens: a tree of arrays."""
        ...

    def decode(self, params: Any, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        """(int32[batch, 1] tokens, cache of those before) -> (logits [batch, 1, vocab], the cache with these)."""
        ...


@dataclass(frozen=True)
class Causal:
    """The functions of a causal model.

    Args:
      apply: (params, int32[batch, seq] tokens) -> logits [batch, seq, vocab], each after its token.
      decoding: how it decodes with a cache. None: each token recomputes its row.
      axes: the model's own name of a mesh axis -> meshpar's, as in `training`.
    """

    apply: Apply
    decoding: Decoding | None = None
    axes: Mapping[str, str] = field(default_factory=dict)

    @property
    def how(self) -> str:
        """How it generates, in words."""
        if self.decoding is None:
            return "each token recomputes its row, without a cache"
        return "with the model's own cache"


def causal(
    model: Any, params: Any, cache: bool | Decoding, decoder: nn.Module | None, axes: Mapping[str, str]
) -> tuple[Any, Causal]:
    """The parameters and the functions of a Flax module, or of a function; see `CausalModel.of`."""
    if isinstance(model, nnx.Module):
        params, apply, found = _of_nnx(model, params)
    elif params is None:
        raise ConfigError(f"a {type(model).__name__} needs its parameters; CausalModel.of(model, params)")
    elif isinstance(model, nn.Module):
        apply, found = linen_functions(model, decoder)
    elif callable(model):
        apply, found = model, None
    else:
        raise ConfigError(f"{type(model).__name__} is no Flax module, and no function (params, tokens) -> logits")
    if decoder is not None and not isinstance(model, nn.Module):
        raise ConfigError("decoder: only a Linen module has one; pass cache=, an object with init_cache and decode")
    given: Any = cache if not isinstance(cache, bool) else found if cache else None
    return params, Causal(apply, given, axes)  # pyright: ignore[reportArgumentType]


def logits_of(model: Causal, params: Any, tokens: jax.Array, specs: Any) -> jax.Array:
    """The logits of whole rows, in the context of a mesh; under explicit axes if the model is written for them.

    Args:
      specs: tree of `ArraySpec` of the parameters.

    Raises:
      ConfigError: the model cannot be called with its parameters and tokens, or declares shardings that do not fit.
    """

    def of() -> list[Any]:
        rows = {"tokens": ArraySpec(tokens.shape, np.dtype(tokens.dtype), ("batch", ""))}
        of_params, of_rows, _ = explicit.shardings((params, rows, None), (specs, rows, {}), model.axes)
        return [of_params, of_rows["tokens"]]

    with flax_rules(model.axes), explained():
        try:
            return explicit.call(model.apply, (params, tokens), of)
        except TypeError as error:
            call = "the model cannot be called with its parameters and tokens alone"
            raise ConfigError(f"{call}: {error}; CausalModel.of(lambda params, tokens: ..., params)") from error


def empty_cache(model: Causal, params: Any, length: int, specs: Any) -> Any:
    """The empty cache of a row of up to `length` tokens, in the context of a mesh; see `logits_of`."""
    return _of_a_row(model, _empty(model, length), (params,), lambda: _sharded(model, params, specs)[:1])


def decoded_by(
    model: Causal, params: Any, tokens: jax.Array, cache: Any, length: int, specs: Any
) -> tuple[jax.Array, Any]:
    """The logits of a row after one more token, and its next cache, in the context of a mesh; see `empty_cache`."""
    assert model.decoding

    def sharded() -> list[Any]:
        of_params, of_row = _sharded(model, params, specs)
        return [of_params, of_row, undeclared.typed(_empty(model, length), (params,), (of_params,), model.axes)]

    return _of_a_row(model, model.decoding.decode, (params, tokens, cache), sharded)


def logits_of_row(model: Causal, params: Any, tokens: jax.Array, specs: Any) -> jax.Array:
    """The logits of int32[1, seq] tokens without a cache, in the context of a mesh; see `logits_of`."""
    return _of_a_row(model, model.apply, (params, tokens), lambda: _sharded(model, params, specs))


def _of_a_row(model: Causal, function: Callable[..., Any], arguments: tuple[Any, ...], of: Callable[[], Any]) -> Any:
    """Calls a function on a single row, which explicit axes would not divide: without what it declares for them."""
    with flax_rules(model.axes):
        try:
            return function(*arguments)
        except ValueError as error:
            if not explicit.is_refusal(error):
                raise
        return undeclared.called(function, arguments, of(), model.axes)


def _empty(model: Causal, length: int) -> Callable[[Any], Any]:
    decoding = model.decoding
    assert decoding
    return lambda params: decoding.init_cache(params, 1, length)


def _sharded(model: Causal, params: Any, specs: Any) -> list[Any]:
    """A tree of `PartitionSpec` of the parameters, and that of the tokens of a row."""
    tokens = {"tokens": ArraySpec((1, 1), np.dtype("int32"), ("batch", ""))}
    of_params, of_rows, _ = explicit.shardings((params, tokens, None), (specs, tokens, {}), model.axes)
    return [of_params, of_rows["tokens"]]


def linen_dims(module: nn.Module) -> dict[str, tuple[str | None, ...]]:
    """The names of dims that a Linen module declares: parameters of a training have none of its boxes any more."""
    try:
        made = jax.eval_shape(
            lazily(lambda key: module.init(key, jnp.zeros((1, 1), jnp.int32), **mode(module, False))), jax.random.key(0)
        )
    except TypeError:  # it takes more than tokens, which `logits_of` reports
        return {}
    return declared_dims(made["params"])


# Linen --------------------------------------------------------------------------------------------------------------


def linen_functions(module: nn.Module, decoder: nn.Module | None = None) -> tuple[Apply, Decoding | None]:
    return _linen_apply(module), _linen_decoding(module, decoder)


def _linen_apply(module: nn.Module) -> Apply:
    evaluates = mode(module, is_training=False)
    return lambda params, tokens: module.apply({"params": params}, tokens, **evaluates)  # pyright: ignore[reportReturnType]


def _linen_decoding(module: nn.Module, decoder: nn.Module | None) -> Decoding | None:
    if decoder is None and hasattr(module, "init_cache") and hasattr(module, "decode") and callable(module.decode):
        return _LinenMethods(module)
    if decoder is None and "decode" in getattr(module, "__dataclass_fields__", {}):
        decoder = module.clone(decode=True)
    return _Collection(decoder) if decoder is not None else None


@dataclass(frozen=True)
class _LinenMethods:
    """Methods `init_cache` and `decode` of a Linen module."""

    module: nn.Module

    def init_cache(self, params: Any, batch_size: int, length: int) -> Any:
        return self.module.apply({"params": params}, batch_size, length, method="init_cache")

    def decode(self, params: Any, tokens: jax.Array, cache: Any) -> Any:
        return self.module.apply({"params": params}, tokens, cache, method="decode")


@dataclass(frozen=True)
class _Collection:
    """A Linen module whose layers keep a collection `cache`, as `MultiHeadDotProductAttention(decode=True)` does.

    Its first call, with tokens of the whole length, makes the collection.
    """

    module: nn.Module

    def init_cache(self, params: Any, batch_size: int, length: int) -> Any:
        tokens = jnp.zeros((batch_size, length), jnp.int32)
        made = self.module.init(jax.random.key(0), tokens, **mode(self.module, is_training=False))
        if "cache" not in made:
            what = f"{type(self.module).__name__} makes no collection 'cache' with decode=True"
            raise ConfigError(f"{what}; pass decode to its attention, or CausalModel.of(..., cache=False)")
        return unboxed(made["cache"])

    def decode(self, params: Any, tokens: jax.Array, cache: Any) -> Any:
        state, evaluates = {"params": params, "cache": cache}, mode(self.module, is_training=False)
        logits, changed = self.module.apply(state, tokens, mutable=["cache"], **evaluates)
        return logits, changed["cache"]


# NNX ----------------------------------------------------------------------------------------------------------------


def _of_nnx(model: nnx.Module, params: Any) -> tuple[Any, Apply, Decoding | None]:
    graph, own, others = nnx.split(model, nnx.Param, ...)
    apply, decoding = nnx_functions(graph, own, others)
    return own if params is None else params, apply, decoding


def nnx_functions(graph: Any, params: Any, others: Any) -> tuple[Apply, Decoding | None]:
    """The functions of an NNX module.

    Args:
      params: its parameters, or structs like them.
      others: the state beside its parameters, such as the keys of its dropout.
    """

    def merged(params: Any) -> Any:
        made = nnx.merge(graph, params, *([others] if others else []), copy=True)
        made.eval()
        return made

    def apply(params: Any, tokens: jax.Array) -> jax.Array:
        model = merged(params)
        return model(tokens, **mode(model, is_training=False))

    return apply, _nnx_decoding(merged(params), merged)


def _nnx_decoding(model: nnx.Module, merged: Callable[[Any], Any]) -> Decoding | None:
    if hasattr(model, "init_cache") and hasattr(model, "decode"):
        return _NnxMethods(merged)
    return _Variables(merged) if _caching(model) else None


def _caching(model: nnx.Module) -> list[nnx.MultiHeadAttention]:
    return [module for _, module in nnx.iter_modules(model) if isinstance(module, nnx.MultiHeadAttention)]


@dataclass(frozen=True)
class _NnxMethods:
    """Methods `init_cache` and `decode` of an NNX module."""

    merged: Callable[[Any], Any]

    def init_cache(self, params: Any, batch_size: int, length: int) -> Any:
        return self.merged(params).init_cache(batch_size, length)

    def decode(self, params: Any, tokens: jax.Array, cache: Any) -> Any:
        return self.merged(params).decode(tokens, cache)


@dataclass(frozen=True)
class _Variables:
    """An NNX module whose attention keeps variables of the kind `nnx.Cache`."""

    merged: Callable[[Any], Any]

    def init_cache(self, params: Any, batch_size: int, length: int) -> Any:
        model = self.merged(params)
        for attention in _caching(model):
            attention.init_cache((batch_size, length, attention.in_features))
        return nnx.to_pure_dict(nnx.state(model, nnx.Cache))

    def decode(self, params: Any, tokens: jax.Array, cache: Any) -> Any:
        model = self.merged(params)
        batch_size = tokens.shape[0]
        for attention in _caching(model):
            attention.init_cache((batch_size, 1, attention.in_features))
        model.set_attributes(decode=True, raise_if_not_found=False)
        state = nnx.state(model, nnx.Cache)
        nnx.replace_by_pure_dict(state, cache)
        nnx.update(model, state)
        logits = model(tokens, **mode(model, is_training=False))
        return logits, nnx.to_pure_dict(nnx.state(model, nnx.Cache))
