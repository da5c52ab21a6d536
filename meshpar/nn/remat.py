"""Remat: which activations of a block are saved for its backward, offloaded to the host, or recomputed.

Layers name their activations with `named`, and a config selects some of the names. A layer with a `custom_vjp` names
the values that it gets, returns, or saves for its backward.

Source: Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022, arXiv:2205.05198 (selective recomputation).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import pydantic
from jax.ad_checkpoint import Offloadable, checkpoint_name
from jaxtyping import Array, Float

from meshpar.config import Config

Activation = Literal["input", "q", "k", "v", "attn", "log_mass", "residual", "gate", "up"]
"""The activations of a block that have names, in the order in which it computes them.

- `input`: the residual stream before the block, [batch, residual_seq, embed]. It is saved unless it is offloaded.
- `q`, `k`, `v`: queries, keys and values after head norms and rotary positions, [batch, seq, heads, head_dim].
- `attn`: the result of attention, before its output projection, [batch, seq, heads, head_dim].
- `log_mass`: the log of each query's sum of exponentials, [batch, seq, heads], which attention in blocks needs with
  `attn`. Without either of the two the backward computes attention again.
- `residual`: the residual stream between attention and MLP, after the sum over devices, [batch, residual_seq, embed].
- `gate`, `up`: the projections of the MLP before its activation function, [batch, seq, mlp].
"""

CUDNN = "dot_product_attention_fwd_wrapper"
"""The forward of cuDNN's attention in a trace. It returns `attn` and `log_mass`, to which JAX gives no names."""
Policy = Callable[..., Any]
_policies = jax.checkpoint_policies
POLICIES: dict[str, Policy] = {
    "none": _policies.everything_saveable,
    "dots": _policies.checkpoint_dots,
    "dots_no_batch": _policies.checkpoint_dots_with_no_batch_dims,
    "full": _policies.nothing_saveable,
}


_RESULTS: dict[str, set[Activation]] = {CUDNN: {"attn", "log_mass"}}
"""A kernel -> the activations that it returns, which have one place: its backward needs all of them."""


def named(x: Float[Array, "*dims"], name: Activation) -> Float[Array, "*dims"]:
    """Names an activation for `Remat`; x itself is unchanged."""
    return checkpoint_name(x, name)


class Remat(Config):
    """What the backward of a block recomputes: a policy, and activations that are exempt from it, by name.

    >>> Remat(policy="none", offload=["residual"]).recomputes  # it moves this activation back from the host
    True
    """

    shorthand: ClassVar = "policy"
    shorthand_is_whole: ClassVar = True
    policy: Literal["none", "dots", "dots_no_batch", "full"] = "full"
    """Which activations outside `save` and `offload` are recomputed: none, all but matmuls, all but weight matmuls, or
    all."""
    save: tuple[Activation, ...] = ()
    """Activations that are saved, on the device."""
    offload: tuple[Activation, ...] = ()
    """Activations that are saved in the host's memory."""

    @pydantic.model_validator(mode="after")
    def _save_or_offload(self) -> Remat:
        if both := [name for name in self.save if name in self.offload]:
            raise ValueError(f"{', '.join(both)}: in save and in offload, but an activation has one place")
        return self

    @property
    def recomputes(self) -> bool:
        """Whether the backward needs anything that the forward does not leave on the device."""
        return self.policy != "none" or bool(self.offload)

    def checkpoint_policy(self) -> Policy:
        """The policy for `jax.checkpoint`."""
        others = POLICIES[self.policy]

        def saves(primitive: Any, *avals: Any, **params: Any) -> Any:
            names = {params["name"]} if primitive.name == "name" else _RESULTS.get(primitive.name)
            if not names or not names <= {*self.save, *self.offload}:
                return others(primitive, *avals, **params)
            return True if names.isdisjoint(self.offload) else Offloadable(src="device", dst="pinned_host")

        return saves
