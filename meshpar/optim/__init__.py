"""Optimizers, learning rate schedules and pruning.

>>> from meshpar import optim
>>> optim.AdamW(lr=3e-4, schedule=optim.Cosine(warmup_steps=100)).schedule.kind
'cosine'
"""

from typing import Annotated

import pydantic

from meshpar.optim.adafactor import Adafactor
from meshpar.optim.adamw import AdamW
from meshpar.optim.lion import Lion
from meshpar.optim.muon import Muon
from meshpar.optim.pruning import Magnitude, NOfM
from meshpar.optim.schedule import WSD, Constant, Cosine, Linear
from meshpar.optim.sgd import SGD

__all__ = [
    "SGD", "WSD", "Adafactor", "AdamW", "Constant", "Cosine", "Linear", "Lion", "Magnitude", "Muon", "NOfM",
]  # fmt: skip

Optimizer = Annotated[AdamW | Lion | SGD | Adafactor | Muon, pydantic.Field(discriminator="kind")]
