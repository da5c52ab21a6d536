"""The losses that a config names, and their metrics."""

from __future__ import annotations

from meshpar.train.tasks.base import NamedLoss
from meshpar.train.tasks.classify import Classify
from meshpar.train.tasks.contrastive import Contrastive
from meshpar.train.tasks.masked_tokens import MaskedTokens
from meshpar.train.tasks.regress import Regress

__all__ = ["Classify", "Contrastive", "MaskedTokens", "NamedLoss", "Regress"]
