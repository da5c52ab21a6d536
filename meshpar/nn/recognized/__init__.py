"""Finds attention in a traced program, however it is written, and computes it by one of meshpar's cores.

A softmax between two products holds the scores of all pairs of tokens. `rewritten` replaces it, in any model, by the
operation that meshpar's own models use.
"""

from meshpar.nn.recognized.rewrite import Found, rewritten, with_attention

__all__ = ["Found", "rewritten", "with_attention"]
