"""The fastest algorithm: what the very tables that run would take on a chip's links.

A message costs its link's latency for each hop, and its bytes over the link's bandwidth; a round lasts as long as its
busiest link. On a torus a message goes the shorter way around, and shares each link that it passes; on a switch a
device has one link, for all that it sends.
"""

from __future__ import annotations

from functools import lru_cache

import jax
import numpy as np

from meshpar.collectives.algorithms import Algorithm, algorithms, plan
from meshpar.collectives.plan import Operation, Plan, Round
from meshpar.mesh.hardware import LINKS, Link, chip_of


@lru_cache(maxsize=4096)
def choose(operation: Operation, num_ranks: int, num_bytes: int, link: Link | None = None) -> Algorithm:
    """The algorithm that takes the least time.

    Args:
      num_bytes: S, of the whole buffer.
      link: default: the one inside a slice of the chips that are here. Where no maker states it, as for a CPU, the
        algorithm is that of the fewest bytes, and among those of the fewest rounds.

    >>> from meshpar.mesh.hardware import LINKS
    >>> link = LINKS["TPU v5e"].inside
    >>> choose("all_reduce", 16, 1 << 10, link), choose("all_reduce", 16, 1 << 30, link)
    ('recursive_doubling', 'bidirectional_ring')
    """
    link = link or here()
    plans: dict[Algorithm, Plan] = {name: plan(operation, name, num_ranks) for name in algorithms(operation)}
    if link is None:
        return min(plans, key=lambda name: (plans[name].sent_bytes(num_bytes), plans[name].num_rounds))
    return min(plans, key=lambda name: seconds(plans[name], num_bytes, link))


def seconds(of: Plan, num_bytes: int, link: Link) -> float:
    """The time of a plan for a buffer of S = `num_bytes`, in the model above."""
    hops, chunks = work(of, link.torus)
    return hops * link.latency_s + chunks * num_bytes / of.num_chunks / link.bytes_per_s


@lru_cache(maxsize=1024)
def work(of: Plan, torus: bool) -> tuple[int, int]:
    """Hops one after the other, and chunks through the busiest links, of all rounds."""
    one = _on_torus if torus else _on_switch
    rounds = [one(round_, of.num_ranks) for round_ in of.rounds]
    return sum(hops for hops, _ in rounds), sum(chunks for _, chunks in rounds)


def _on_switch(round_: Round, num_ranks: int) -> tuple[int, int]:
    sent, got = np.zeros((2, num_ranks), int)
    for permute in round_:
        sent[permute.source] += permute.chunks.shape[1]
        got[permute.target] += permute.chunks.shape[1]
    return 1, int(max(sent.max(), got.max()))


def _on_torus(round_: Round, num_ranks: int) -> tuple[int, int]:
    hops, load = 0, np.zeros((2, 2 * num_ranks + 1), int)
    for permute in round_:
        right = (permute.target - permute.source) % num_ranks
        for way, start, distance in ((0, permute.source, right), (1, -permute.source % num_ranks, num_ranks - right)):
            takes = distance * 2 <= num_ranks if way == 0 else distance * 2 < num_ranks
            np.add.at(load[way], start[takes], permute.chunks.shape[1])
            np.add.at(load[way], (start + distance)[takes], -permute.chunks.shape[1])
            hops = max(hops, int(distance[takes].max(initial=0)))
    on_links = load.cumsum(axis=1)[:, :-1]
    return hops, int((on_links[:, :num_ranks] + on_links[:, num_ranks:]).max())


def here() -> Link | None:
    """The link between the chips that are here, inside a slice; None where no maker states it."""
    chip = chip_of(jax.devices()[0])
    return LINKS[chip.name].inside if chip and chip.name in LINKS else None
