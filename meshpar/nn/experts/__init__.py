"""Mixtures of experts: a router sends each token to a few of many MLPs.

Source: Shazeer et al. 2017, arXiv:1701.06538; Lepikhin et al. 2020, arXiv:2006.16668 (GShard).
"""

from meshpar.nn.experts.config import Balance, Experts
from meshpar.nn.experts.functional import mixture

__all__ = ["Balance", "Experts", "mixture"]
