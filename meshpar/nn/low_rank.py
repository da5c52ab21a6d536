"""The low-rank update of a linear map, as LoRA and DoRA train it: `scale * x @ a @ b`."""

from __future__ import annotations

from dataclasses import dataclass, field
from string import ascii_lowercase
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.nn import dora
from meshpar.parallel.precision import wide
from meshpar.partition.op import apply
from meshpar.partition.signature import Call, Signature


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapter:
    """The matrices of an update.

    Args:
      a: [inputs..., rank].
      b: [rank, outputs...].
      used: bool [batch, rank], which columns of x @ a the rows of x use; None if all rows use all.
    """

    a: Any  # arrays; JAX also builds it with placeholders
    b: Any
    scale: float = field(metadata={"static": True})
    used: Any = None

    def term(self, x: jax.Array) -> jax.Array:
        """The update of x[batch, seq, inputs...]."""
        return self.of(jnp.tensordot(x, self.a, axes=self.a.ndim - 1))

    def of(self, thin: jax.Array) -> jax.Array:
        """The update, where `thin` [batch, seq, rank] is x @ a."""
        if self.used is not None:
            thin = jnp.where(self.used[:, None, :], thin, jnp.zeros_like(thin))
        return self.scaled(jnp.tensordot(thin, self.b, axes=1))

    def scaled(self, x: jax.Array) -> jax.Array:
        return x * jnp.asarray(self.scale, x.dtype)


class LowRank(nnx.Module):
    """`x[.., in] @ a[in.., rank] @ b[rank, out..] * scale`; b starts at zero, so the model is unchanged at first.

    With DoRA it also holds the change of the magnitude of each output, `magnitude[out..]`, see `dora`.
    """

    def __init__(self, a: nnx.Param, b: nnx.Param, scale: float, magnitude: nnx.Param | None = None):
        self.a = a
        self.b = b
        self.scale = scale
        self.magnitude = magnitude
        self.used: jax.Array | None = nnx.data(None)
        """See `Adapter`."""

    @property
    def adapter(self) -> Adapter:
        return Adapter(self.a[...], self.b[...], self.scale, self.used)

    def term(self, x: jax.Array) -> jax.Array:
        """The update of x, as one operation: if x @ a were one, its gradient would be summed, and not that of a."""
        own = self.adapter
        used = [] if own.used is None else [own.used]

        def compute(call: Call, x: jax.Array, a: jax.Array, b: jax.Array, *used: jax.Array) -> list[jax.Array]:
            return [Adapter(a, b, self.scale, *used).term(x)]

        def of_thin(call: Call, thin: jax.Array, b: jax.Array, *used: jax.Array) -> list[jax.Array]:
            return [Adapter(None, b, self.scale, *used).of(thin)]

        inputs = tuple(f"input {i}" for i in range(own.a.ndim - 1))
        outputs = tuple(f"output {i}" for i in range(own.b.ndim - 1))
        rows = tuple(range(x.ndim - len(inputs)))
        ins = ((*rows, *inputs), (*inputs, None), (None, *outputs), *[(rows[0], None)] * len(used))
        of_x = ascii_lowercase[: x.ndim]
        equation = of_x, f"{of_x[len(rows) :]}z", f"{of_x[: len(rows)]}z"
        signature = Signature(ins, ((*rows, *outputs),), compute, summed=inputs, equation=equation, then=of_thin)
        return apply(signature, x, own.a, own.b, *used)[0]

    def stretched(self, y: jax.Array, kernel: jax.Array) -> jax.Array:
        """The sum of x @ kernel and its update, with DoRA's magnitudes if there are any."""
        if self.magnitude is None:
            return y
        update = self.scale * jnp.tensordot(wide(self.a[...]), wide(self.b[...]), axes=1, precision="highest")
        inputs = tuple(range(self.a.ndim - 1))
        return y * dora.stretch(kernel, update, self.magnitude[...], inputs).astype(y.dtype)


def use_adapters(module: nnx.Module, used: jax.Array | None) -> None:
    """Sets the columns of x @ a that each row uses, in all updates of a module."""
    if used is None:
        return
    for _, part in nnx.iter_modules(module):
        if isinstance(part, LowRank):
            part.used = used
