"""Attention: one layer, and the cores that compute how tokens attend to each other.

A model's key `attention` selects the core; each core is one file. All cores give the same result, and differ in time
and memory. `layer.py` contains the parts around every core: projections, head norms, rotary positions and local heads.
Generation uses the core of its cache instead.

>>> from meshpar import attention, models
>>> sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64}
>>> models.Llama(**sizes, attention=attention.Blocks(block_size=256)).attention.block_size
256
"""

from meshpar.nn.attention.auto import Auto
from meshpar.nn.attention.blocks import Blocks
from meshpar.nn.attention.core import Reference
from meshpar.nn.attention.cudnn import Cudnn
from meshpar.nn.attention.functional import attend
from meshpar.nn.attention.splash import Splash

AnyCore = Auto | Reference | Blocks | Cudnn | Splash
"""The cores that a config can select."""

__all__ = ["Auto", "Blocks", "Cudnn", "Reference", "Splash", "attend"]
