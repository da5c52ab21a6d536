"""The algorithms: builders of plans, of a few lines each, for any number of ranks.

An algorithm says how it gathers everywhere, scatters, broadcasts and exchanges. The rest follows: reductions are the
transposes of these, a broadcast is a scatter and an all-gather, an all-reduce a reduce-scatter and an all-gather.

n ranks, a buffer of S bytes; bytes are those of the rank that sends most:

| | all-gather, reduce-scatter | all-reduce | rounds of an all-reduce |
|---|---|---|---|
| ring | (n-1)/n S | 2(n-1)/n S | 2(n-1) |
| bidirectional_ring | (n-1)/n S | 2(n-1)/n S | 2 ceil((n-1)/2) |
| halving_doubling | (n-1)/n S | 2(n-1)/n S | 2 ceil(log2 n) |
| recursive_doubling | | S log2 n | log2 n, and 2 more unless n is a power of two |
| tree | | at most 2 S | about 4 log2 n |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Literal, get_args

import numpy as np

from meshpar.collectives.plan import NONE, OPERATIONS, TRANSPOSED, Operation, Permute, Plan, Round
from meshpar.errors import ConfigError

Algorithm = Literal["ring", "bidirectional_ring", "halving_doubling", "recursive_doubling", "tree"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
Builder = Callable[[int, int], Plan]
"""(number of ranks, root) -> plan."""


@lru_cache(maxsize=1024)
def plan(operation: Operation, algorithm: Algorithm, num_ranks: int, root: int = 0) -> Plan:
    """The plan of an algorithm for an operation.

    Raises:
      ConfigError: the algorithm has no plan for that operation.

    >>> plan("all_reduce", "ring", 8).num_rounds, plan("all_reduce", "ring", 8).sent_bytes(800)
    (14, Fraction(1400, 1))
    """
    if operation not in operations(algorithm):
        others = ", ".join(algorithms(operation))
        raise ConfigError(f"{algorithm} has no plan for {operation}; there are {others or ', '.join(OPERATIONS)}")
    build = lambda operation: plan(operation, algorithm, num_ranks, root)
    if operation in BUILDERS[algorithm]:
        return BUILDERS[algorithm][operation](num_ranks, root)
    match operation:
        case "broadcast":
            return build("scatter").then(build("all_gather"), "broadcast")
        case "all_reduce" if "all_gather" in BUILDERS[algorithm]:
            return build("reduce_scatter").then(build("all_gather"), "all_reduce")
        case "all_reduce":
            return build("reduce").then(build("broadcast"), "all_reduce")
        case _:
            return build(TRANSPOSED[operation]).transposed


def operations(algorithm: Algorithm) -> tuple[Operation, ...]:
    """What an algorithm has a plan for."""
    return OPERATIONS if "all_gather" in BUILDERS[algorithm] else ("broadcast", "reduce", "all_reduce")


def algorithms(operation: Operation) -> tuple[Algorithm, ...]:
    """Those that have a plan for an operation."""
    return tuple(name for name in ALGORITHMS if operation in operations(name))


# Everybody to everybody -------------------------------------------------------------------------------------------


def ring_all_gather(n: int, root: int) -> Plan:
    """Each passes on, to its right, what it got last."""
    ranks = np.arange(n)
    return _all_gather(n, [(_right(ranks, ranks - turn),) for turn in range(n - 1)])


def bidirectional_all_gather(n: int, root: int) -> Plan:
    """The same to the left and to the right at once: half as many rounds."""
    ranks = np.arange(n)
    rounds: list[Round] = [
        (_right(ranks, ranks - turn), _left(ranks, ranks + turn))[: n - 1 - 2 * turn] for turn in range(n // 2)
    ]
    return _all_gather(n, rounds)


def doubling_all_gather(n: int, root: int) -> Plan:
    """Each has the next 1, 2, 4, ... chunks after its own; the last round brings what is missing, for any n.

    Source: Bruck et al. 1997, IEEE TPDS 8(11); its transpose as a reduce-scatter: Träff 2024, arXiv:2410.14234.
    """
    ranks, rounds = np.arange(n), []
    for have in _doubling(n):
        chunks = (ranks[:, None] + np.arange(min(have, n - have))) % n
        rounds.append((Permute(ranks, (ranks - have) % n, chunks),))
    return _all_gather(n, rounds)


def shifting_all_to_all(n: int, root: int) -> Plan:
    """In round k each sends to the k-th on its right. Slot k holds what goes there, and then what came from there."""
    return _all_to_all(n, [(_shift(n, k),) for k in range(1, n)])


def bidirectional_all_to_all(n: int, root: int) -> Plan:
    """In round k each sends to the k-th on its right and on its left."""
    return _all_to_all(n, [(_shift(n, k), _shift(n, n - k))[: n - 2 * k + 1] for k in range(1, n // 2 + 1)])


def doubling_all_to_all(n: int, root: int) -> Plan:
    """A chunk travels its distance by powers of two: few rounds, but S/2 bytes in each.

    Source: Bruck et al. 1997, IEEE TPDS 8(11).
    """
    ranks, rounds = np.arange(n), []
    for distance in _doubling(n):
        chunks = np.flatnonzero(np.arange(n) & distance)
        rounds.append((Permute(ranks, (ranks + distance) % n, np.tile(chunks, (n, 1)), keeps=False),))
    return _all_to_all(n, rounds)


def doubling_all_reduce(n: int, root: int) -> Plan:
    """Partners at distance 1, 2, 4, ... exchange all that they have. Those beyond a power of two lend theirs first."""
    size = 1 << (n.bit_length() - 1)
    paired, beyond = np.arange(size), np.arange(size, n)
    lend = Permute(beyond, beyond - size, _whole(n - size), adds=True, keeps=False)
    rounds: list[Round] = [(Permute(paired, paired ^ d, _whole(size), adds=True),) for d in _doubling(size)]
    rounds = [(lend,), *rounds, (Permute(beyond - size, beyond, _whole(n - size)),)] if n > size else rounds
    return Plan("all_reduce", n, 1, tuple(rounds), _whole(n), _whole(n))


# From one to all --------------------------------------------------------------------------------------------------


def chain_scatter(n: int, root: int) -> Plan:
    """The root sends what goes farthest first, and each passes on what is not its own."""
    return _scatter(n, root, [(_chain(n, root, n - 1, turn, 1),) for turn in range(n - 1)])


def bidirectional_scatter(n: int, root: int) -> Plan:
    """Two chains, to the right and to the left."""
    right, left = n // 2, (n - 1) // 2
    rounds: list[Round] = [
        (_chain(n, root, right, turn, 1), *[_chain(n, root, left, turn, -1)] * (turn < left)) for turn in range(right)
    ]
    return _scatter(n, root, rounds)


def halving_scatter(n: int, root: int) -> Plan:
    """A binomial tree: who has the chunks of a range of ranks sends the upper half of them on."""
    rounds: list[Round] = []
    for distance in reversed(_doubling(n)):
        sources = np.arange(0, n - distance, 2 * distance)
        counts = np.minimum(distance, n - distance - sources)
        rounds.append(tuple(_halve(n, root, sources[counts == c], distance, c) for c in np.unique(counts)[::-1]))
    return _scatter(n, root, rounds)


def doubling_broadcast(n: int, root: int) -> Plan:
    """All who have it send it on: twice as many have it after each round."""
    rounds: list[Round] = []
    for have in _doubling(n):
        sources = np.arange(min(have, n - have))
        rounds.append((Permute((sources + root) % n, (sources + have + root) % n, _whole(len(sources))),))
    return _broadcast(n, root, 1, rounds)


def tree_broadcast(n: int, root: int) -> Plan:
    """Half of the buffer down a binary tree, half down another, in which the inner ranks of the first are leaves.

    Source: Sanders, Speck and Träff 2009, Parallel Computing 35(12).
    """
    other = lambda v: v and (n - v if n % 2 else v % (n - 1) + 1)
    edges = _binary_tree(1, n - 1)
    trees = (edges, [(when, other(source), other(target)) for when, source, target in edges])
    num_rounds = 1 + max((when for when, *_ in edges), default=-1) + 2 * (PIECES - 1) * (n > 1)
    rounds = [tuple(_down(n, root, tree, half, turn) for half, tree in enumerate(trees)) for turn in range(num_rounds)]
    return _broadcast(n, root, 2 * PIECES, [tuple(p for p in round_ if len(p.source)) for round_ in rounds])


PIECES = 4
"""Into which each half of the buffer is cut, so that the levels of a tree work at once."""

BUILDERS: dict[Algorithm, dict[Operation, Builder]] = {
    "ring": {
        "all_gather": ring_all_gather,
        "scatter": chain_scatter,
        "all_to_all": shifting_all_to_all,
    },
    "bidirectional_ring": {
        "all_gather": bidirectional_all_gather,
        "scatter": bidirectional_scatter,
        "all_to_all": bidirectional_all_to_all,
    },
    "halving_doubling": {
        "all_gather": doubling_all_gather,
        "scatter": halving_scatter,
        "all_to_all": doubling_all_to_all,
    },
    "recursive_doubling": {"broadcast": doubling_broadcast, "all_reduce": doubling_all_reduce},
    "tree": {"broadcast": tree_broadcast},
}


def _all_gather(n: int, rounds: list[Round]) -> Plan:
    return Plan("all_gather", n, n, tuple(rounds), np.arange(n)[:, None], _all(n, n))


def _all_to_all(n: int, rounds: list[Round]) -> Plan:
    ranks, others = np.arange(n)[:, None], np.arange(n)
    return Plan("all_to_all", n, n, tuple(rounds), (others - ranks) % n, (ranks - others) % n)


def _scatter(n: int, root: int, rounds: list[Round]) -> Plan:
    return Plan("scatter", n, n, tuple(rounds), _only(root, _all(n, n)), np.arange(n)[:, None], root)


def _broadcast(n: int, root: int, num_chunks: int, rounds: list[Round]) -> Plan:
    whole = _all(n, num_chunks)
    return Plan("broadcast", n, num_chunks, tuple(rounds), _only(root, whole), whole, root)


def _right(ranks: np.ndarray, chunks: np.ndarray) -> Permute:
    return Permute(ranks, (ranks + 1) % len(ranks), chunks[:, None] % len(ranks))


def _left(ranks: np.ndarray, chunks: np.ndarray) -> Permute:
    return Permute(ranks, (ranks - 1) % len(ranks), chunks[:, None] % len(ranks))


def _shift(n: int, distance: int) -> Permute:
    ranks = np.arange(n)
    return Permute(ranks, (ranks + distance) % n, np.full((n, 1), distance), keeps=False)


def _chain(n: int, root: int, length: int, turn: int, step: int) -> Permute:
    """Those within `turn` of the root pass on; the chunk of the farthest leaves first."""
    sources = np.arange(turn + 1)
    at = lambda distance: (root + step * distance) % n
    return Permute(at(sources), at(sources + 1), at(length - turn + sources)[:, None], keeps=False)


def _halve(n: int, root: int, sources: np.ndarray, distance: int, count: int) -> Permute:
    at = lambda rank: (root + rank) % n
    targets = sources + distance
    return Permute(at(sources), at(targets), at(targets[:, None] + np.arange(count)), keeps=False)


def _binary_tree(first: int, last: int, parent: int = 0, when: int = 0) -> list[tuple[int, int, int]]:
    """(round, parent, child) of the in-order binary tree on first..last, its left subtree full; odd ones are leaves."""
    if last < first:
        return []
    top = first - 1 + (1 << ((last - first + 1).bit_length() - 1))
    left, right = _binary_tree(first, top - 1, top, when + 1), _binary_tree(top + 1, last, top, when + 2)
    return [(when, parent, top), *left, *right]


def _down(n: int, root: int, tree: list[tuple[int, int, int]], half: int, turn: int) -> Permute:
    """What travels down a tree in one round: a piece enters every second round."""
    sent = [
        (source, target, 2 * piece + half)
        for when, source, target in tree
        for piece in range(PIECES)
        if when + 2 * piece == turn
    ]
    source, target, chunk = np.array(sent, int).reshape(-1, 3).T
    return Permute((source + root) % n, (target + root) % n, chunk[:, None])


def _doubling(n: int) -> list[int]:
    """1, 2, 4, ... below n."""
    return [1 << i for i in range((n - 1).bit_length())]


def _whole(num_messages: int) -> np.ndarray:
    """Messages of the one chunk that there is."""
    return np.zeros((num_messages, 1), int)


def _all(n: int, num_chunks: int) -> np.ndarray:
    return np.tile(np.arange(num_chunks), (n, 1))


def _only(root: int, slots: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(slots))[:, None] == root, slots, NONE)
