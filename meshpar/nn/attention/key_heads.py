"""Which key heads a device needs, where devices share the query heads of one key head.

Shapes: B batch, S seq, T key positions, H heads, K kv_heads, P places, h head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from meshpar.mesh.varying import varies_over, varying
from meshpar.nn.attention.exchange import HEADS, sent_key_heads
from meshpar.nn.layers import within_layer
from meshpar.parallel.context import constrain, manual_axes, planned
from meshpar.parallel.sequence import SEQ
from meshpar.partition.op import apply
from meshpar.partition.signature import Call, Signature

PLACE = "place"


@dataclass(frozen=True)
class KeyPlaces:
    """Places for key heads that are sharded as the query heads are, of a planned program of whole arrays.

    Args:
      heads: int[places], the key head at each place.
      in_8_bits: whether layers multiply in 8 bits.
    """

    heads: np.ndarray
    in_8_bits: bool

    def of_modules(self, modules: Any) -> Any:
        """Projections and norms that compute a key head for each place; the modules themselves in 8 bits.

        So a device projects the keys of its own heads, and what is summed over devices is the gradient of parameters.
        In 8 bits a device needs the whole gradient of a key head to find its scale, so all devices project all heads.
        """
        if self.in_8_bits:
            return modules
        graph, params = nnx.split(modules)
        places = self._places()

        def placed(param: Any) -> Any:
            dims = within_layer(param)
            if "kv_heads" not in dims:
                return param
            return param.replace(self._taken(param[...], dims.index("kv_heads"), places, pins=True))

        return nnx.merge(graph, jax.tree.map(placed, params, is_leaf=lambda x: isinstance(x, nnx.Variable)))

    def of_heads(self, x: Float[Array, "B S K h"]) -> Float[Array, "B S P h"]:
        """The key heads at the places, of keys or values from `of_modules`.

        Communication: in 8 bits an all-gather where the residual stream is sharded in tokens; backward a sum.
        """
        if not self.in_8_bits:
            return x
        ctx = planned()
        whole = () if ctx is None or ctx.axes("seq") else (SEQ,)
        return self._taken(x, HEADS, self._places(), whole=whole)

    def _places(self) -> Int[Array, "P"]:
        return constrain(jnp.arange(len(self.heads)), "heads")

    def _taken(self, x: jax.Array, axis: int, places: Int[Array, "P"], **how: Any) -> jax.Array:
        """`x[.., K, ..] -> [.., P, ..]`."""

        def take(call: Call, x: jax.Array, places: jax.Array) -> list[jax.Array]:
            heads = [jnp.asarray(self.heads)[place] for place in places]
            return [jnp.concatenate([lax.dynamic_slice_in_dim(x, head, 1, axis) for head in heads], axis)]

        given = tuple(None if i == axis else i for i in range(x.ndim))
        taken = tuple(PLACE if i == axis else i for i in range(x.ndim))
        return apply(Signature((given, (PLACE,)), (taken,), take, **how), x, places)[0]


def key_places(heads: int, kv_heads: int) -> KeyPlaces | None:
    """The places in a planned program whose devices share query heads, but no key heads; else None."""
    ctx = planned()
    if ctx is None or ctx.axes("heads") == ctx.axes("kv_heads"):
        return None
    sent = sent_key_heads(heads, kv_heads, ctx.shards("heads"))
    return KeyPlaces(np.arange(kv_heads) if sent is None else sent, ctx.number_format is not None)


def local_key_heads(k_BTKh: Float[Array, "B T K h"], q_BSHh: Float[Array, "B S H h"]) -> Float[Array, "B T L h"]:
    """Selects the key heads of the local query heads if the rules shard `heads` but not `kv_heads`; else all.

    If all local query heads share one key head, it is the only one; else each query head gets its own.
    """
    axes = manual_axes("heads")
    if axes == manual_axes("kv_heads"):
        return k_BTKh
    heads = q_BSHh.shape[2]
    group = heads * jax.lax.axis_size(axes) // k_BTKh.shape[2]
    first = jax.lax.axis_index(axes) * heads
    which = (first + jnp.arange(1 if group % heads == 0 else heads, dtype=jnp.int32)) // group
    return jnp.take(varying(k_BTKh, tuple(sorted(varies_over(q_BSHh)))), which, axis=2)
