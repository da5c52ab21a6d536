"""The difference of two trees of arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def largest_difference(found: Any, expected: Any) -> float:
    """The largest absolute difference of two trees of arrays; NaN if there is one, which `max` would overlook."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return float(np.max([np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in pairs]))
