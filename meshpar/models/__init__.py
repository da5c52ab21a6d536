"""The built-in models and the scalings of rotary positions. The key `kind` of a config selects one.

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
"""The registry of decoder families."""
KINDS: tuple[type[ModelContract], ...] = get_args(Family)

__all__ = ["GPT", "Interpolated", "Llama", "Llama3"]
