"""Mixtures of experts of the families: each with its router.

Shapes: B batch, S seq, D embed, E experts, M mlp.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from meshpar.models.families.layers import ACTIVATIONS, Feedforward, Linear
from meshpar.models.families.options import MLP, PARTS, Experts
from meshpar.nn.layers import filled, normal
from meshpar.parallel.precision import wide


class Mixture(nnx.Module):
    """`x[B, S, D] -> sum of weight[e] * mlp_e(x)`, over each token's experts e, and the shared MLP."""

    def __init__(self, width: int, options: Experts, *, rngs: nnx.Rngs):
        self.options = options
        self.router = Linear([("embed", width)], [("router", options.num)], bias=options.router_bias, rngs=rngs)
        self.choice_bias = filled(0.0, (options.num,), ("router",)) if options.has_choice_bias else None
        self.experts = ManyFeedforwards(width, options.num, options.mlp, rngs=rngs)
        shared = MLP(width=options.shared, act=options.mlp.act, form="split") if options.shared else None
        self.shared = Feedforward(width, shared, rngs=rngs) if shared else None
        self.shared_gate = Linear([("embed", width)], [(PARTS, 1)], rngs=rngs) if options.shared_gate else None

    def __call__(self, x: jax.Array) -> jax.Array:
        weights = self._weights(x)
        y = self.experts(x, weights.astype(x.dtype), self.options.weighs_inputs)
        if self.shared is None:
            return y
        shared = self.shared(x)
        return y + (shared if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * shared)

    def _weights(self, x: jax.Array) -> jax.Array:
        """The weight of each expert for each token [B, S, E], 0 for the others. In float32 at least."""
        options = self.options
        logits = jnp.einsum("bsd,de->bse", wide(x), wide(self.router.kernel[...]), precision="highest")
        if self.router.bias is not None:
            logits = logits + wide(self.router.bias[...])
        if options.router == "sparsemixer":
            return _sparsemixer(logits, options.jitter)
        scores = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}.get(options.router, lambda x: x)(logits)
        ranks = scores if self.choice_bias is None else scores + wide(self.choice_bias[...])
        chosen = _chosen(lax.stop_gradient(_within_groups(ranks, options)), options.per_token)
        if options.router == "softmax_chosen":
            weights = jax.nn.softmax(jnp.where(chosen, scores, -jnp.inf))
        else:
            weights = jnp.where(chosen, scores, 0.0)
        if options.normalize:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        return weights * jnp.asarray(options.scale, weights.dtype)


def _within_groups(ranks: jax.Array, options: Experts) -> jax.Array:
    """The ranks, with those of groups that a token does not choose below all others."""
    if options.groups == options.groups_per_token:
        return ranks
    grouped = ranks.reshape(*ranks.shape[:-1], options.groups, -1)
    best = lax.top_k(grouped, 1 if options.group_score == "best" else 2)[0].sum(-1)
    kept = _chosen(best, options.groups_per_token)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(ranks.shape)


def _chosen(ranks: jax.Array, count: int) -> jax.Array:
    """Which elements of the last dim are the `count` largest."""
    _, ids = lax.top_k(ranks, count)
    return (ids[..., None] == jnp.arange(ranks.shape[-1])).any(-2)


def _sparsemixer(logits: jax.Array, jitter: float) -> jax.Array:
    """Two experts one after another, weighed by a softmax over those near it (phimoe, arXiv:2409.12136)."""
    weights = jnp.zeros_like(logits)
    left = logits
    for _ in range(2):
        top = left.max(-1, keepdims=True)
        near = (top - logits) / jnp.maximum(jnp.abs(logits), top) <= 2 * jitter
        gates = jax.nn.softmax(jnp.where(near, left, -jnp.inf))
        chosen = _chosen(lax.stop_gradient(left), 1)
        weights = weights + jnp.where(chosen, gates, 0.0)
        left = jnp.where(chosen, -jnp.inf, left)
    return weights


class ManyFeedforwards(nnx.Module):
    """The MLPs of all experts: gate and up [E, D, M], down [E, M, D]; or fused, [E, D, 2, M] or [E, D, M, 2]."""

    def __init__(self, width: int, num: int, options: MLP, *, rngs: nnx.Rngs):
        self.act = options.act
        mlp, embed = ("mlp", options.width), ("embed", width)
        outs = {"fused": ((PARTS, 2), mlp), "split": (mlp,)}[options.form]
        if options.act == "gpt_oss":
            outs = (mlp, (PARTS, 2))
        kernel = partial(_kernel, num, rngs=rngs)
        bias = partial(_bias, num) if options.bias else lambda *dims: None
        is_fused = len(outs) == 2
        self.gate_up = kernel(embed, *outs) if is_fused else None
        self.gate_up_bias = bias(*outs) if is_fused else None
        self.gate = None if is_fused else kernel(embed, mlp)
        self.up = None if is_fused else kernel(embed, mlp)
        self.down = kernel(mlp, embed)
        self.down_bias = bias(embed)

    def __call__(self, x: jax.Array, weights_BSE: jax.Array, weighs_inputs: bool) -> jax.Array:
        many = x[:, :, None] * weights_BSE[..., None] if weighs_inputs else x
        rows = "bsed" if weighs_inputs else "bsd"
        hidden = self._hidden(many, rows)
        if not weighs_inputs:
            hidden = hidden * weights_BSE[..., None]
        y = jnp.einsum("bsem,emd->bsd", hidden, self.down[...])
        return y if self.down_bias is None else y + jnp.einsum("bse,ed->bsd", weights_BSE, self.down_bias[...])

    def _hidden(self, x: jax.Array, rows: str) -> jax.Array:
        if self.gate_up is None:
            assert self.gate is not None and self.up is not None
            gate, up = (jnp.einsum(f"{rows},edm->bsem", x, one[...]) for one in (self.gate, self.up))
            return ACTIVATIONS[self.act](gate) * up
        if self.act != "gpt_oss":
            both = jnp.einsum(f"{rows},edpm->bsepm", x, self.gate_up[...])
            return ACTIVATIONS[self.act](both[..., 0, :]) * both[..., 1, :]
        assert self.gate_up_bias is not None
        both = jnp.einsum(f"{rows},edmp->bsemp", x, self.gate_up[...]) + self.gate_up_bias[...]
        gate, up = jnp.minimum(both[..., 0], 7.0), jnp.clip(both[..., 1], -7.0, 7.0)
        return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


def _kernel(num: int, *dims: tuple[str, int], rngs: nnx.Rngs) -> nnx.Param:
    names, sizes = zip(("experts", num), *dims, strict=True)
    return normal(rngs, sizes, sizes[1] ** -0.5, names)


def _bias(num: int, *dims: tuple[str, int]) -> nnx.Param:
    names, sizes = zip(("experts", num), *dims, strict=True)
    return filled(0.0, sizes, names)
