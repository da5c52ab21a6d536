"""Causal self-attention: one layer, and the cores that it can use.

`layer.py` contains what all variants share: projections, head norms, rotary positions, local heads. A core computes
how tokens attend to each other, see `core.Core`; each core is one file. A model supports a core if the type of its
field `attention` includes it. Generation passes the core of its cache instead.
"""

from meshpar.nn.attention.layer import Attention, Bias

__all__ = ["Attention", "Bias"]
