"""Users' own code, and Optax beneath it, runs under JAX's usual promotion."""

from __future__ import annotations

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield
