"""Attention: one layer, and the cores that compute how tokens attend to each other.

A model's key `attention` selects the core; each core is one file, and `reference.py` says what all of them compute.
They differ in time and memory. `layer.py` contains the parts around every core: projections, head norms and rotary
positions. Generation uses the core of its cache instead, `paged.py`.

`blocks.py` computes the pairs of blocks in `tables.py` by `online_softmax.py`, with the keys of each shard in turn,
`shards.py`. Where devices share rows, `context_parallel.py` moves shards before and after a core, by `exchange.py`.

>>> from meshpar import attention, models
>>> sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64}
>>> models.Llama(**sizes, attention=attention.Blocks(block_size=256)).attention.block_size
256
"""

from meshpar.nn.attention.auto import Auto
from meshpar.nn.attention.blocks import Blocks
from meshpar.nn.attention.cudnn import Cudnn
from meshpar.nn.attention.functional import attend
from meshpar.nn.attention.reference import Reference
from meshpar.nn.attention.splash import Splash

AnyCore = Auto | Reference | Blocks | Cudnn | Splash
"""The cores that a config can select."""

__all__ = ["Auto", "Blocks", "Cudnn", "Reference", "Splash", "attend"]
