"""The mixture of experts as a layer: routes, dispatches, computes and combines.

Shapes: B batch, S seq, R residual_seq, D embed, E experts, K experts of a token, M mlp.
"""

from __future__ import annotations

from fractions import Fraction
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from meshpar.nn.experts.capacity import by_capacity, of_places
from meshpar.nn.experts.config import Experts
from meshpar.nn.experts.dropless import dropless
from meshpar.nn.experts.mlp import RoutedExperts
from meshpar.nn.experts.on_shards import on_shards
from meshpar.nn.experts.routing import Router, Routes, means
from meshpar.nn.layers import SwiGLU, within_layer
from meshpar.nn.remat import Activation
from meshpar.parallel import tensor
from meshpar.parallel.context import ParallelContext, dispatch_axes, planned
from meshpar.parallel.outputs import Auxiliary
from meshpar.parallel.scopes import needed

DROPPED = "experts_dropped"
"""The metric with the fraction of choices that had no place, under `dispatch: capacity`."""


class MixtureOfExperts(nnx.Module):
    """`sum over a token's experts e of weight[e] * swiglu_e(x)`, and the shared experts.

    The experts are sharded over the dispatch axes, which shard the batch outside of this layer. Their hidden layer is
    sharded over the axes of `mlp`, and their storage over the axes of `embed`.

    Communication: tokens travel to the devices of their experts and back, see `dropless` and `of_places`; and that of
      `tensor.enter_region` and `exit_region`, twice with shared experts.
    """

    activations: ClassVar[tuple[Activation, ...]] = SwiGLU.activations

    def __init__(self, width: int, experts: Experts, *, out_std: float, rngs: nnx.Rngs):
        hidden = experts.intermediate_size
        self.config = experts
        self.router = Router(width, experts, rngs=rngs)
        self.experts = RoutedExperts(experts.num, width, hidden, out_std=out_std, rngs=rngs)
        joint = experts.shared * hidden
        self.shared = SwiGLU(width, joint, bias=False, out_std=out_std, rngs=rngs) if joint else None

    def __call__(
        self, x_BRD: Float[Array, "B R D"], targets_BS: Int[Array, "B S"] | None = None
    ) -> tuple[Float[Array, "B R D"], Auxiliary]:
        """Returns the sum of the results, and the losses and metrics of the router.

        Args:
          targets_BS: only tokens with a target of at least 0 count in losses and metrics. Default: all tokens do.
        """
        ctx = planned()
        y_BRD, auxiliary = self._planned(ctx, x_BRD, targets_BS) if ctx else self.routed(x_BRD, targets_BS)
        return y_BRD if self.shared is None else y_BRD + self.shared(x_BRD), auxiliary

    def routed(
        self, x_BRD: Float[Array, "B R D"], targets_BS: Int[Array, "B S"] | None
    ) -> tuple[Float[Array, "B R D"], Auxiliary]:
        """The results without those of shared experts, of local shards or whole arrays."""
        routes = self.router(x_BRD)
        y_BRD, is_kept_BRK = self._routed(x_BRD, routes)
        counted_BS = jnp.ones(x_BRD.shape[:2], bool) if targets_BS is None else targets_BS >= 0
        counted_BR = counted_BS if targets_BS is None else tensor.local_seq(counted_BS)
        count = counted_BS.sum(dtype=jnp.int32)
        auxiliary = self.router.auxiliary(routes, counted_BR, count)
        if is_kept_BRK is not None:
            is_dropped = counted_BR[..., None] & ~is_kept_BRK
            num = is_dropped.sum().astype(routes.scores.dtype) / self.config.per_token
            auxiliary.metrics.update(means({DROPPED: num}, count))
        return y_BRD, auxiliary

    def _planned(
        self, ctx: ParallelContext, x_BRD: Float[Array, "B R D"], targets_BS: Int[Array, "B S"] | None
    ) -> tuple[Float[Array, "B R D"], Auxiliary]:
        routed = nnx.merge(*nnx.split(self))
        routed.shared = None
        graph, state = nnx.split(routed)
        params, tree = jax.tree.flatten(state, is_leaf=lambda x: isinstance(x, nnx.Variable))

        def compute(x: jax.Array, targets: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, Auxiliary]:
            own = [param.replace(a) for param, a in zip(params, arrays, strict=True)]
            return nnx.merge(graph, jax.tree.unflatten(tree, own)).routed(x, targets)

        targets = jnp.zeros(x_BRD.shape[:2], jnp.int32) if targets_BS is None else targets_BS
        arrays, dims = zip(*((param[...], within_layer(param)) for param in params), strict=True)
        return on_shards(compute, ctx, x_BRD, targets, arrays, dims)

    def _routed(self, x_BRD: jax.Array, routes: Routes) -> tuple[jax.Array, jax.Array | None]:
        """The weighted sum of the routed experts' results; and which choices had a place, None if all had one."""
        x_BSD = tensor.enter_region(x_BRD, "mlp")
        weights_BSK = tensor.enter_region(routes.weights, "mlp")
        ids_BSK = tensor.whole_seq(routes.ids)
        weights = self.experts.weights
        axes = dispatch_axes("experts")
        num = self.config.num
        if self.config.dispatch == "capacity":
            places = max(1, self.config.capacity(x_BSD.shape[1]))  # a row of generation may have one token
            num_choices = ids_BSK.shape[1] * self.config.per_token
            with needed(Fraction(min(num_choices, num * places), num * places)):
                y_BSD, is_kept_BSK = by_capacity(
                    x_BSD, ids_BSK, weights_BSK, lambda x: of_places(weights, x, axes), num, places
                )
            return tensor.exit_region(y_BSD, "mlp"), tensor.local_seq(is_kept_BSK)
        rows, seq = x_BSD.shape[:2]
        x_TD, ids_TK, weights_TK = (x.reshape(rows * seq, -1) for x in (x_BSD, ids_BSK, weights_BSK))
        y_TD = dropless(x_TD, ids_TK, weights_TK, weights, axes)
        return tensor.exit_region(y_TD.reshape(x_BSD.shape), "mlp"), None
