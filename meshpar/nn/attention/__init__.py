"""Attention: one layer, and the cores with which it can compute how tokens attend to each other.

The key `attention` of a model selects a core; each is one file. All compute the same, and differ in time and memory.
`layer.py` contains what they share: projections, head norms, rotary positions, local heads. Generation passes the core
of its cache instead.

>>> from meshpar import attention, models
>>> sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64}
>>> models.Llama(**sizes, attention=attention.Blocks(block_size=256)).attention.block_size
256
"""

from meshpar.nn.attention.auto import Auto
from meshpar.nn.attention.blocks import Blocks
from meshpar.nn.attention.cudnn import Cudnn
from meshpar.nn.attention.reference import Reference
from meshpar.nn.attention.splash import Splash

AnyCore = Auto | Reference | Blocks | Cudnn | Splash
"""The cores that a config can select."""

__all__ = ["Auto", "Blocks", "Cudnn", "Reference", "Splash"]
