"""Optimizers and learning rate schedules.

>>> from meshpar import optim
>>> optim.AdamW(lr=3e-4, schedule=optim.Cosine(warmup_steps=100)).schedule.kind
'cosine'
"""

from meshpar.train.adafactor import Adafactor
from meshpar.train.muon import Muon
from meshpar.train.optim import SGD, AdamW, Lion
from meshpar.train.schedule import WSD, Constant, Cosine, Linear

__all__ = ["SGD", "WSD", "Adafactor", "AdamW", "Constant", "Cosine", "Linear", "Lion", "Muon"]
