"""The rules of the partitioner: primitive -> how it is planned. One file a family."""

from __future__ import annotations

from meshpar.partition.rules import (
    calls,
    constraints,
    contraction,
    derivatives,
    elementwise,
    indexing,
    loops,
    random,
    reduction,
    shape,
    whole,
)
from meshpar.partition.rules.rule import Rule

RULES: dict[str, Rule] = {}
"""Name of a primitive -> (scope, equation, nodes of its operands) -> nodes of its results."""

for family in (elementwise, contraction, reduction, shape, indexing, random, whole):
    RULES |= family.RULES
for family in (constraints, loops, calls, derivatives):
    RULES |= family.RULES
for name, key in constraints.FOLLOWING.items():
    RULES[name] = constraints.following(RULES[name], key)
