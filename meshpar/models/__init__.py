"""The built-in models, the user's own, and how rotary positions are stretched; each chosen by `kind`.

>>> from meshpar import models
>>> models.Llama(num_layers=2, width=32, num_heads=4, mlp_width=64, rope_scaling=models.Interpolated(factor=4)).kind
'llama'
"""

from typing import Annotated, get_args

import pydantic

from meshpar.models.contract import ModelContract
from meshpar.models.gpt import GPT
from meshpar.models.imported import Import
from meshpar.models.llama import Llama
from meshpar.nn.rotary import Interpolated, Llama3

Model = Annotated[Llama | GPT | Import, pydantic.Field(discriminator="kind")]
"""Every kind of model is registered here."""
KINDS: tuple[type[ModelContract], ...] = get_args(get_args(Model)[0])

__all__ = ["GPT", "Import", "Interpolated", "Llama", "Llama3"]
