"""The built-in models, and how rotary positions are stretched; each chosen by `kind`.

>>> from meshpar import models
>>> scaling = models.Interpolated(factor=4)
>>> models.Llama(num_layers=2, hidden_size=32, num_heads=4, intermediate_size=64, rope_scaling=scaling).kind
'llama'
"""

from typing import get_args

from meshpar.models.contract import ModelContract
from meshpar.models.gpt import GPT
from meshpar.models.llama import Llama
from meshpar.nn.rotary import Interpolated, Llama3

Family = Llama | GPT
"""Every decoder family is registered here."""
KINDS: tuple[type[ModelContract], ...] = get_args(Family)

__all__ = ["GPT", "Interpolated", "Llama", "Llama3"]
