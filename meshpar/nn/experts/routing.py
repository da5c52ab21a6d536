"""The router of a mixture of experts: which experts each token uses, and with which weights.

Shapes: B batch, R residual_seq, D embed, E experts, K experts of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from meshpar.nn.experts.config import Experts
from meshpar.nn.layers import filled, normal
from meshpar.parallel.context import manual_axes
from meshpar.parallel.outputs import Auxiliary
from meshpar.parallel.precision import wide

LOAD = "experts_load"
"""The metric of a layer with each expert's fraction of all choices, float[experts]."""


class Routes(NamedTuple):
    """The experts that the router selects for a device's tokens.

    Args:
      ids: int32 [batch, residual_seq, per_token], the experts of each token, without repetition.
      weights: float [batch, residual_seq, per_token], the factors of the experts' results.
      scores: float [batch, residual_seq, experts], positive, with a sum of 1 for each token.
      logits: float [batch, residual_seq, experts].
    """

    ids: jax.Array
    weights: jax.Array
    scores: jax.Array
    logits: jax.Array


class Router(nnx.Module):
    """`x[B, R, D] @ weight[D, E] -> scores -> the K best experts of each token`.

    If scores are equal, the expert with the lower index wins, on every layout.

    Numerics: in float32 at least.
    Communication: none.
    """

    def __init__(self, width: int, experts: Experts, *, rngs: nnx.Rngs):
        self.experts = experts
        self.weight = normal(rngs, (width, experts.num), width**-0.5, ("embed", "router"))
        carried = experts.balance and experts.balance.carried
        self.bias = filled(0.0, (experts.num,), ("router",)) if carried == "bias" else None
        self.load = filled(1 / experts.num, (experts.num,), ("router",)) if carried == "load" else None

    def __call__(self, x_BRD: Float[Array, "B R D"]) -> Routes:
        logits = jnp.einsum("brd,de->bre", wide(x_BRD), wide(self.weight[...]), precision="highest")
        raw = jax.nn.softmax(logits) if self.experts.router == "softmax" else jax.nn.sigmoid(logits)
        ids = self._selected(lax.stop_gradient(raw))
        weights = jnp.take_along_axis(raw, ids, axis=-1)
        if self.experts.normalize:
            weights /= weights.sum(-1, keepdims=True)
        scores = raw / raw.sum(-1, keepdims=True)
        return Routes(ids, weights * jnp.asarray(self.experts.scale, weights.dtype), scores, logits)

    def auxiliary(self, routes: Routes, counted_BR: Bool[Array, "B R"], count: Int[Array, ""]) -> Auxiliary:
        """The losses and the load of this layer: means over the tokens that count.

        Args:
          counted_BR: which tokens count.
          count: their number on this device, over all of `residual_seq`.

        Communication: with sequence parallelism an all-reduce of the sums over the axes of `residual_seq`. For the
          balance loss with the load of this step an all-reduce of E numbers over all axes of the tokens.
        """
        each = counted_BR.astype(routes.logits.dtype)
        num_choices = jax.nn.one_hot(routes.ids, self.experts.num, dtype=each.dtype).sum(-2)
        sums = {
            LOAD: jnp.einsum("br,bre->e", each, num_choices) / self.experts.per_token,
        }
        balance = self.experts.balance
        if balance and balance.kind == "loss":
            load_E = self._load(sums[LOAD], counted_BR)
            product = jnp.einsum("br,bre,e->", each, routes.scores, load_E)
            sums["balance_loss"] = balance.weight * self.experts.num * product
        if self.experts.z_loss:
            square = jnp.square(jax.nn.logsumexp(routes.logits, axis=-1))
            sums["router_z_loss"] = self.experts.z_loss * (each * square).sum()
        losses = means(sums, count)
        load = losses.pop(LOAD)
        return Auxiliary(losses, {LOAD: load})

    def _load(self, choices_E: Float[Array, "E"], counted_BR: Bool[Array, "B R"]) -> Float[Array, "E"]:
        """The load in the balance loss, without a gradient: of the last step, or of all tokens of this step.

        Args:
          choices_E: the choices of this device's tokens that count, in units of a token.
        """
        if self.load is not None:
            return lax.stop_gradient(self.load[...].astype(choices_E.dtype))
        count = counted_BR.sum(dtype=jnp.int32)
        if axes := manual_axes("batch") + manual_axes("seq") + manual_axes("residual_seq"):
            choices_E, count = lax.psum((choices_E, count), axes)
        return lax.stop_gradient(choices_E / jnp.maximum(count, 1).astype(choices_E.dtype))

    def _selected(self, scores_BRE: Float[Array, "B R E"]) -> Int[Array, "B R K"]:
        if self.bias is not None:
            scores_BRE += lax.stop_gradient(self.bias[...].astype(scores_BRE.dtype))
        if self.experts.groups > 1:
            scores_BRE = _of_best_groups(scores_BRE, self.experts.groups, self.experts.groups_per_token)
        return lax.top_k(scores_BRE, self.experts.per_token)[1].astype(jnp.int32)


def means(sums: dict[str, jax.Array], count: Int[Array, ""]) -> dict[str, jax.Array]:
    """Means over `count` tokens from sums over this device's shard of `residual_seq`; 0 where no token counts."""
    if axes := manual_axes("residual_seq"):
        sums = lax.psum(sums, axes)
    count = jnp.maximum(count, 1)
    return {name: x / count.astype(x.dtype) for name, x in sums.items()}


def _of_best_groups(scores_BRE: Float[Array, "B R E"], groups: int, num: int) -> Float[Array, "B R E"]:
    """The scores of the experts in the `num` groups with the largest sum of two scores; minus infinity for others.

    Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2.
    """
    of_groups = scores_BRE.reshape(*scores_BRE.shape[:-1], groups, -1)
    best_two = lax.top_k(of_groups, min(2, of_groups.shape[-1]))[0].sum(-1)
    ids = lax.top_k(best_two, num)[1]
    is_selected = jax.nn.one_hot(ids, groups, dtype=jnp.int32).sum(-2) > 0
    return jnp.where(is_selected[..., None], of_groups, -jnp.inf).reshape(scores_BRE.shape)
