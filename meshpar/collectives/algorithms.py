"""The algorithms of the collectives: functions that build a plan for any number of ranks.

Each algorithm defines a few operations, such as its all-gather, scatter and all-to-all. The others follow from these: a
reduction is a transpose, a broadcast is a scatter and an all-gather, and an all-reduce is a reduce-scatter and an
all-gather.

Costs for n ranks and a buffer of S bytes; the bytes are those of the rank that sends most:

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

    Args:
      num_ranks: n, the size of the group.
      root: the root of a broadcast, scatter, gather or reduction.

    Raises:
      ConfigError: the algorithm has no plan for that operation.

    Examples:
      >>> plan("all_reduce", "ring", 8).num_rounds, plan("all_reduce", "ring", 8).sent_bytes(800)
      (14, Fraction(1400, 1))
    """
    if operation not in operations(algorithm):
        others = algorithms(operation) or OPERATIONS
        raise ConfigError(f"algorithm {algorithm} has no plan for {operation}; use one of {', '.join(others)}")

    def part(operation: Operation) -> Plan:
        return plan(operation, algorithm, num_ranks, root)

    builders = BUILDERS[algorithm]
    if operation in builders:
        return builders[operation](num_ranks, root)
    match operation:
        case "broadcast":
            return part("scatter").then(part("all_gather"), "broadcast")
        case "all_reduce" if "all_gather" in builders:
            return part("reduce_scatter").then(part("all_gather"), "all_reduce")
        case "all_reduce":
            return part("reduce").then(part("broadcast"), "all_reduce")
        case _:
            return part(TRANSPOSED[operation]).transposed


def operations(algorithm: Algorithm) -> tuple[Operation, ...]:
    """The operations for which an algorithm has a plan."""
    return OPERATIONS if "all_gather" in BUILDERS[algorithm] else ("broadcast", "reduce", "all_reduce")


def algorithms(operation: Operation) -> tuple[Algorithm, ...]:
    """The algorithms that have a plan for an operation.

    >>> algorithms("scatter")
    ('ring', 'bidirectional_ring', 'halving_doubling')
    """
    return tuple(name for name in ALGORITHMS if operation in operations(name))


# All to all -------------------------------------------------------------------------------------------------------


def ring_all_gather(n: int, root: int) -> Plan:
    """In each round every rank sends the chunk that it received last to its right."""
    return _all_gather(n, [(_pass_on(n, 1, turn),) for turn in range(n - 1)])


def bidirectional_all_gather(n: int, root: int) -> Plan:
    """A ring to the right and one to the left at once: half as many rounds."""
    rounds: list[Round] = [(_pass_on(n, 1, turn), _pass_on(n, -1, turn)) for turn in range((n - 1) // 2)]
    if n % 2 == 0:  # the rank halfway around
        rounds.append((_pass_on(n, 1, n // 2 - 1),))
    return _all_gather(n, rounds)


def doubling_all_gather(n: int, root: int) -> Plan:
    """Doubles the chunks that every rank holds in each round; for any n, the last round sends only the missing ones.

    Source: Bruck et al. 1997, IEEE TPDS 8(11); its transpose as a reduce-scatter: Träff 2024, arXiv:2410.14234.
    """
    ranks = np.arange(n)
    rounds: list[Round] = []
    for have in _doubling(n):
        chunks = (ranks[:, None] + np.arange(min(have, n - have))) % n
        rounds.append((Permute(ranks, (ranks - have) % n, chunks),))
    return _all_gather(n, rounds)


def shifting_all_to_all(n: int, root: int) -> Plan:
    """In round k every rank sends slot k to the k-th rank on its right, and stores the received message there."""
    return _all_to_all(n, [(_shift(n, k),) for k in range(1, n)])


def bidirectional_all_to_all(n: int, root: int) -> Plan:
    """In round k every rank sends to the k-th rank on its right and to the k-th on its left."""
    rounds: list[Round] = [(_shift(n, k), _shift(n, n - k)) for k in range(1, (n + 1) // 2)]
    if n % 2 == 0:
        rounds.append((_shift(n, n // 2),))
    return _all_to_all(n, rounds)


def doubling_all_to_all(n: int, root: int) -> Plan:
    """A chunk travels its distance in powers of two: few rounds, but S/2 bytes in each.

    Source: Bruck et al. 1997, IEEE TPDS 8(11).
    """
    ranks = np.arange(n)
    rounds: list[Round] = []
    for distance in _doubling(n):
        chunks = np.flatnonzero(ranks & distance)
        rounds.append((Permute(ranks, (ranks + distance) % n, np.tile(chunks, (n, 1)), keeps=False),))
    return _all_to_all(n, rounds)


def doubling_all_reduce(n: int, root: int) -> Plan:
    """Partners at distance 1, 2, 4, ... exchange their sums.

    Ranks beyond the largest power of two first add their buffer to a partner's, and receive the total at the end.
    """
    size = 1 << (n.bit_length() - 1)
    paired = np.arange(size)
    rounds: list[Round] = [(Permute(paired, paired ^ d, _whole(size), adds=True),) for d in _doubling(size)]
    if n > size:
        beyond = np.arange(size, n)
        before = Permute(beyond, beyond - size, _whole(n - size), adds=True, keeps=False)
        after = Permute(beyond - size, beyond, _whole(n - size))
        rounds = [(before,), *rounds, (after,)]
    return Plan("all_reduce", n, 1, tuple(rounds), _whole(n), _whole(n))


# One to all -------------------------------------------------------------------------------------------------------


def chain_scatter(n: int, root: int) -> Plan:
    """The root sends the farthest rank's chunk first, and every rank forwards all chunks but its own."""
    return _scatter(n, root, [(_chain(n, root, n - 1, turn, 1),) for turn in range(n - 1)])


def bidirectional_scatter(n: int, root: int) -> Plan:
    """Two chains, to the right and to the left."""
    right = n // 2
    left = (n - 1) // 2
    rounds: list[Round] = [(_chain(n, root, right, i, 1), _chain(n, root, left, i, -1)) for i in range(left)]
    if n % 2 == 0:
        rounds.append((_chain(n, root, right, left, 1),))
    return _scatter(n, root, rounds)


def halving_scatter(n: int, root: int) -> Plan:
    """A binomial tree: a rank that holds the chunks of a range of ranks sends on the upper half of them."""
    rounds: list[Round] = []
    for distance in reversed(_doubling(n)):
        sources = np.arange(0, n - distance, 2 * distance)
        counts = np.minimum(distance, n - distance - sources)
        permutes = []
        for count in np.unique(counts)[::-1]:
            source = root + sources[counts == count]
            target = source + distance
            chunks = target[:, None] + np.arange(count)
            permutes.append(Permute(source % n, target % n, chunks % n, keeps=False))
        rounds.append(tuple(permutes))
    return _scatter(n, root, rounds)


def doubling_broadcast(n: int, root: int) -> Plan:
    """Every rank that has the buffer sends it to another one, so each round doubles the number of such ranks."""
    rounds: list[Round] = []
    for have in _doubling(n):
        sources = root + np.arange(min(have, n - have))
        rounds.append((Permute(sources % n, (sources + have) % n, _whole(len(sources))),))
    return _broadcast(n, root, 1, rounds)


def tree_broadcast(n: int, root: int) -> Plan:
    """Half of the buffer goes down a binary tree, half down another whose leaves are the first one's inner ranks.

    Source: Sanders, Speck and Träff 2009, Parallel Computing 35(12).
    """

    def in_second_tree(rank: int) -> int:
        return rank and (n - rank if n % 2 else rank % (n - 1) + 1)

    first = _binary_tree(1, n - 1)
    trees = (first, [(when, in_second_tree(source), in_second_tree(target)) for when, source, target in first])
    num_rounds = max((when + 2 * PIECES - 1 for when, *_ in first), default=0)
    rounds = [tuple(_down(n, root, tree, half, turn) for half, tree in enumerate(trees)) for turn in range(num_rounds)]
    return _broadcast(n, root, 2 * PIECES, [tuple(p for p in round_ if len(p.source)) for round_ in rounds])


PIECES = 4
"""Number of pieces of each half of the buffer; with several, the levels of a tree work at the same time."""

BUILDERS: dict[Algorithm, dict[Operation, Builder]] = {
    "ring": {"all_gather": ring_all_gather, "scatter": chain_scatter, "all_to_all": shifting_all_to_all},
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
    distance = (np.arange(n) - np.arange(n)[:, None]) % n
    return Plan("all_to_all", n, n, tuple(rounds), distance, distance.T)


def _scatter(n: int, root: int, rounds: list[Round]) -> Plan:
    return Plan("scatter", n, n, tuple(rounds), _only(root, _all(n, n)), np.arange(n)[:, None], root)


def _broadcast(n: int, root: int, num_chunks: int, rounds: list[Round]) -> Plan:
    whole = _all(n, num_chunks)
    return Plan("broadcast", n, num_chunks, tuple(rounds), _only(root, whole), whole, root)


def _pass_on(n: int, step: int, turn: int) -> Permute:
    """Every rank sends the chunk that came `turn` steps to the next rank."""
    ranks = np.arange(n)
    return Permute(ranks, (ranks + step) % n, (ranks - step * turn)[:, None] % n)


def _shift(n: int, distance: int) -> Permute:
    ranks = np.arange(n)
    return Permute(ranks, (ranks + distance) % n, np.full((n, 1), distance), keeps=False)


def _chain(n: int, root: int, length: int, turn: int, step: int) -> Permute:
    """The ranks within `turn` steps of the root pass on a chunk each; the farthest rank's chunk left first."""
    ranks = root + step * np.arange(turn + 1)
    chunks = ranks + step * (length - turn)
    return Permute(ranks % n, (ranks + step) % n, chunks[:, None] % n, keeps=False)


def _binary_tree(first: int, last: int, parent: int = 0, when: int = 0) -> list[tuple[int, int, int]]:
    """(round, parent, child) of the in-order binary tree on first..last, its left subtree full; odd ones are leaves."""
    if last < first:
        return []
    top = first - 1 + (1 << ((last - first + 1).bit_length() - 1))
    left = _binary_tree(first, top - 1, top, when + 1)
    right = _binary_tree(top + 1, last, top, when + 2)
    return [(when, parent, top), *left, *right]


def _down(n: int, root: int, tree: list[tuple[int, int, int]], half: int, turn: int) -> Permute:
    """The messages that travel down a tree in one round; the root sends a piece every second round."""
    sent = [
        (root + source, root + target, 2 * piece + half)
        for when, source, target in tree
        for piece in range(PIECES)
        if when + 2 * piece == turn
    ]
    sources, targets, chunks = np.array(sent, int).reshape(-1, 3).T
    return Permute(sources % n, targets % n, chunks[:, None])


def _doubling(n: int) -> list[int]:
    """1, 2, 4, ... below n."""
    return [1 << i for i in range((n - 1).bit_length())]


def _whole(num_messages: int) -> np.ndarray:
    """The chunks of messages of a buffer that is one chunk."""
    return np.zeros((num_messages, 1), int)


def _all(n: int, num_chunks: int) -> np.ndarray:
    return np.tile(np.arange(num_chunks), (n, 1))


def _only(root: int, slots: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(slots))[:, None] == root, slots, NONE)
