"""Several LoRA adapters beside one model, of which each row of a batch uses one, or none.

Their updates are those of one adapter whose rank is the sum of theirs: a row uses the columns of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from meshpar.nn.decoder import Decoder
from meshpar.nn.lora import LoRA
from meshpar.nn.transformer import Transformer


@dataclass(frozen=True)
class SideAdapters:
    """The ranks of adapters, and the projections that any of them adapts.

    Args:
      ranks: of each adapter. Scales are part of the second matrices.
      paths: of projections, such as `blocks.attn.q`.

    Memory: each adapted projection holds sum(ranks) * (inputs + outputs) elements.

    >>> SideAdapters(ranks=(2, 1), paths=("blocks.attn.q",)).used(jnp.array([2, 0, 1])).astype(int).tolist()
    [[0, 0, 1], [0, 0, 0], [1, 1, 0]]
    """

    ranks: tuple[int, ...]
    paths: tuple[str, ...]

    @property
    def rank(self) -> int:
        return sum(self.ranks)

    def abstract(self, model: Decoder) -> Transformer:
        """The decoder with the updates, with shapes and dtypes in place of arrays."""

        def build() -> Transformer:
            built = model.build(nnx.Rngs(0))
            LoRA(rank=self.rank, alpha=self.rank, paths=self.paths).adapt(built, nnx.Rngs(0))
            return built

        return nnx.eval_shape(build)

    def used(self, adapters_B: Int[Array, "B"]) -> Bool[Array, "B R"]:
        """The columns that each row uses. Adapters are numbered from 1; 0 is the model without any."""
        owners = np.repeat(np.arange(1, 1 + len(self.ranks)), self.ranks)
        return adapters_B[:, None] == jnp.asarray(owners, adapters_B.dtype)
