"""The training of a model that a config imports: its specs, its init and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from meshpar import imports
from meshpar.adopt import specs_of, tallied, unboxing
from meshpar.errors import ConfigError
from meshpar.models.imported import Import
from meshpar.train.data.packing import ARRAYS
from meshpar.train.loss import Criterion, Loss, next_token_loss


@dataclass(frozen=True)
class Imported:
    """What a user's model is to a training; see `Training` for the fields.

    Args:
      vocab_size: how many token ids the logits are of; None where the loss is the user's own.
    """

    specs: Any
    init: Callable[[jax.Array], Any]
    loss: Loss
    evaluation: Loss
    carried: Any
    init_carried: Callable[[jax.Array], Any]
    draws: bool
    vocab_size: int | None


def imported(model: Import, criterion: Criterion, seq_len: int, seed: int) -> Imported:
    """Imports a model, and its loss if there is one of its own, and asks what its arrays are.

    Args:
      criterion: its target is (model, params, batch, key) -> as of `meshpar.training`; the model is the Linen module,
        or the `GraphDef` of the NNX one. With collections that change there is a fifth argument, `carried`, and a third
        result. Default: the next token's cross entropy of the logits, `model(tokens)`.

    Raises:
      ConfigError: the target is no Flax model, or was not permitted to be imported.
    """
    made, init, init_carried = _inits(model, seq_len)
    carried = specs_of(init_carried, seed, model.dims)
    apply, vocab_size = _applying(made), None
    if criterion.target is None:
        if carried:
            what = f"{model.target} has collections that change: {', '.join(map(str, carried))}"
            raise ConfigError(f"{what}; it needs a loss of its own, loss: package.module:name")
        vocab_size = _vocab_size(model, apply, init, seq_len)
        of_tokens = lambda params, batch, key: apply(params, batch["tokens"])
        of_rows, plain = criterion.build(of_tokens, vocab_size), next_token_loss(of_tokens, vocab_size)
    else:
        given = imports.load(criterion.target)
        plain = of_rows = tallied(lambda *arguments: given(made, *arguments), set(ARRAYS), bool(carried))
    return Imported(
        specs_of(init, seed, model.dims), unboxing(init), of_rows, plain, carried, unboxing(init_carried),
        criterion.target is not None, vocab_size,
    )  # fmt: skip


Inits = tuple[Any, Callable[[jax.Array], Any], Callable[[jax.Array], Any]]
"""The model, key -> parameters, key -> collections that change."""


def _inits(model: Import, seq_len: int) -> Inits:
    build = imports.load(model.target)
    made_by = build.__init__ if isinstance(build, type) else build
    if "rngs" in signature(made_by).parameters:
        return _of_nnx(partial(build, **model.arguments))
    made = build(**model.arguments)
    if isinstance(made, nn.Module):
        return _of_linen(made, seq_len)
    what = f"{model.target} gives {type(made).__name__}, which is no Linen module, and takes no rngs, as NNX's do"
    raise ConfigError(f"{what}; give a function that makes a Flax model")


def _of_linen(made: nn.Module, seq_len: int) -> Inits:
    tokens = jnp.zeros((1, seq_len), jnp.int32)
    variables = lambda key: dict(made.init(key, tokens))
    changing = lambda key: {name: value for name, value in variables(key).items() if name != "params"}
    return made, lambda key: variables(key)["params"], changing


def _of_nnx(build: Callable[..., nnx.Module]) -> Inits:
    with nnx.use_eager_sharding(False):
        abstract = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    state = lambda key, *filters: nnx.state(build(rngs=nnx.Rngs(key)), *filters)
    kept = nnx.All(nnx.Not(nnx.Param), nnx.Not(nnx.RngState))
    return nnx.graphdef(abstract), lambda key: state(key, nnx.Param), lambda key: state(key, kept) or {}


def _applying(made: Any) -> Callable[[Any, jax.Array], jax.Array]:
    """(params, tokens) -> logits."""
    if isinstance(made, nn.Module):
        return lambda params, tokens: made.apply({"params": params}, tokens)  # pyright: ignore
    return lambda params, tokens: nnx.merge(made, params)(tokens)


def _vocab_size(model: Import, apply: Callable[..., Any], init: Callable[..., Any], seq_len: int) -> int:
    tokens = jax.ShapeDtypeStruct((1, seq_len), jnp.int32)
    logits = jax.eval_shape(lambda key, tokens: apply(unboxing(init)(key), tokens), jax.random.key(0), tokens)
    if getattr(logits, "ndim", 0) != 3:
        shape = getattr(logits, "shape", type(logits).__name__)
        raise ConfigError(f"{model.target}: model(tokens[1, {seq_len}]) gives {shape}, not logits [batch, seq, vocab]")
    return logits.shape[-1]
