"""What an optimizer is wrapped in: pruning, a wide copy of the parameters, stochastic rounding, an average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import optax

from meshpar.optim.ema import with_ema
from meshpar.optim.master import with_master
from meshpar.optim.pruning import Prune, with_pruning
from meshpar.optim.rounding import with_stochastic_rounding
from meshpar.parallel.precision import wide_dtype


@dataclass(frozen=True, kw_only=True)
class Wrapping:
    """The wrappers of an optimizer, see the functions that make them.

    Args:
      compute_dtype: the dtype in which the loss computes.
      master_dtype: the dtype of the optimizer's own copy of the parameters; None for no copy.
      rounding: how updated bfloat16 parameters are rounded.
      seed: for stochastic rounding.
    """

    prune: Prune | None = None
    ema: float | None = None
    master_dtype: Any = None
    rounding: Literal["nearest", "stochastic"] = "nearest"
    compute_dtype: Any = "float32"
    seed: int = 0

    @property
    def dtype(self) -> Any:
        """The dtype in which the optimizer computes; None for the dtype of the parameters."""
        if self.rounding == "stochastic":
            return wide_dtype(np.dtype(self.compute_dtype))
        return self.master_dtype and np.dtype(self.master_dtype)

    @property
    def is_elementwise(self) -> bool:
        """Whether the wrapped optimizer updates each element by itself if the optimizer does."""
        return self.rounding == "nearest" and not self.ema and not self.prune

    def of(self, tx: optax.GradientTransformation, specs: Any, kinds: Any) -> optax.GradientTransformation:
        """The wrapped optimizer.

        Args:
          specs, kinds: trees of `ArraySpec` and of `Matrix`, of the trained parameters.

        Raises:
          ConfigError: weights cannot be pruned.
        """
        if self.prune:
            tx = with_pruning(tx, self.prune, specs, kinds)
        if self.master_dtype:
            tx = with_master(tx, self.dtype)
        if self.rounding == "stochastic":
            tx = with_stochastic_rounding(tx, self.dtype, self.seed)
        return with_ema(tx, self.ema) if self.ema else tx
