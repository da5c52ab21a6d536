"""JAX looks at its eight devices before a verb can ask for others."""

from __future__ import annotations

import jax

jax.devices()
