"""Causal self-attention: one layer, and the cores that compute it.

`layer.py` holds what all attention has: projections, head norms, rotary positions, heads of local shards. A core
computes how tokens attend to each other, see `core.Core`. Each core is one file. A model offers a core by one line, in
the type of its field `attention`; a caller that has a cache passes the cache's own core.
"""

from meshpar.nn.attention.layer import Attention, Bias

__all__ = ["Attention", "Bias"]
