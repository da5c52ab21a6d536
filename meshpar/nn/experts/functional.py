"""The mixture of experts as a function of arrays, for a model of the user's own.

Shapes: B batch, S seq, R residual_seq, D embed, E experts, M mlp.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from meshpar.errors import ConfigError
from meshpar.nn.describe import functional
from meshpar.nn.experts.config import Experts
from meshpar.nn.experts.layer import MixtureOfExperts
from meshpar.nn.experts.on_shards import on_shards
from meshpar.parallel.context import current, tracing
from meshpar.parallel.outputs import Auxiliary, Sum

_MATRIX = ("experts", "embed", "mlp")
DIMS = (("embed", "router"), _MATRIX, _MATRIX, ("experts", "mlp", "embed"))
"""The dims of the router's weight, and of gate, up and down."""


def mixture(
    x_BRD: Float[Array, "B R D"], router_DE: Float[Array, "D E"], gate_EDM: Float[Array, "E D M"],
    up_EDM: Float[Array, "E D M"], down_EMD: Float[Array, "E M D"], experts: Experts,
    targets_BS: Int[Array, "B S"] | None = None,
) -> tuple[Float[Array, "B R D"], Auxiliary]:  # fmt: skip
    """Computes a mixture of SwiGLU experts: the sum of `weight[e] * swiglu_e(x)` over each token's experts e.

    Under GSPMD the arrays are global, and the function is a manual region inside. In the manual lowering they are local
    shards by the run's rules; gather matrices that the rules store in shards first.

    Args:
      x_BRD: the tokens, float [batch, seq, embed].
      router_DE: the weight of the router, float [embed, experts].
      gate_EDM: float [experts, embed, mlp], like `up_EDM`; `down_EMD` is float [experts, mlp, embed].
      experts: how tokens select experts, and how they are dispatched. It has neither shared experts nor a `balance`
        other than `{kind: loss, load: step}`.
      targets_BS: only tokens with a target of at least 0 count in losses and metrics. Default: all tokens count.

    Returns:
      The sum [batch, seq, embed] in the dtype of `x_BRD`; and the router's losses and metrics by name, means over the
      tokens of this call.

    Raises:
      ConfigError: `experts` has shared experts, or a balance that needs a parameter which each step changes.

    Communication: tokens travel to the devices of their experts and back, see `dropless` and `of_places`. Under GSPMD
      also an all-reduce of the losses and metrics.

    >>> import jax.numpy as jnp
    >>> experts = Experts(num=4, per_token=2, intermediate_size=8)
    >>> gate = jnp.ones((4, 3, 8))
    >>> y, auxiliary = mixture(jnp.ones((1, 5, 3)), jnp.ones((3, 4)), gate, gate, jnp.ones((4, 8, 3)), experts)
    >>> y.shape, auxiliary.metrics["experts_load"].tolist()
    ((1, 5, 3), [0.5, 0.5, 0.0, 0.0])
    """
    if experts.shared or (experts.balance and experts.balance.carried):
        what = "mixture(...) supports neither shared experts nor a balance that changes parameters"
        raise ConfigError(f"{what}: set experts.shared=0, and no balance, or balance={{kind: loss, load: step}}")
    targets = jnp.zeros(x_BRD.shape[:2], jnp.int32) if targets_BS is None else targets_BS
    arrays = (x_BRD, targets, router_DE, gate_EDM, up_EDM, down_EMD)
    ctx = current()
    if ctx is None:
        return _local(experts, *arrays)
    if ctx.is_local:
        with tracing(replace(ctx, is_planned=False)):  # the caller adds losses as means
            return _local(experts, *arrays)
    x, targets, *params = arrays
    y, sums = on_shards(partial(_local, experts), ctx, x, targets, params, DIMS)
    count = jnp.maximum((targets >= 0).sum(dtype=jnp.int32), 1)
    return y, jax.tree.map(
        lambda x: x.parts.sum(-1) / count.astype(x.parts.dtype), sums, is_leaf=lambda x: isinstance(x, Sum)
    )


def _local(
    experts: Experts, x: jax.Array, targets: jax.Array, router: jax.Array, gate: jax.Array, up: jax.Array,
    down: jax.Array,
) -> tuple[jax.Array, Auxiliary]:  # fmt: skip
    width = x.shape[-1]
    layer = nnx.eval_shape(lambda: MixtureOfExperts(width, experts, out_std=1.0, rngs=nnx.Rngs(0)))
    matrices = {name: {"kernel": kernel} for name, kernel in (("gate", gate), ("up", up), ("down", down))}
    return functional(layer)({"router": {"weight": router}, "experts": matrices}, x, targets)
