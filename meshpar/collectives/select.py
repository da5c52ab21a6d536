"""Selects the fastest algorithm of a collective, by a model of the time of its plan on a chip's links.

A message costs a latency for each hop, plus its bytes over the link's bandwidth. A round lasts as long as its busiest
link. On a torus a message goes the shorter way around and shares each link on its way; on a switch a device sends
everything over one link.
"""

from __future__ import annotations

from functools import lru_cache

import jax
import numpy as np

from meshpar.collectives.algorithms import Algorithm, algorithms, plan
from meshpar.collectives.plan import Operation, Plan, Round
from meshpar.mesh.hardware import LINKS, Link, chip_of


@lru_cache(maxsize=4096)
def select(operation: Operation, num_ranks: int, num_bytes: int, link: Link | None = None) -> Algorithm:
    """The fastest algorithm for an operation.

    Args:
      num_bytes: S, the size of the whole buffer.
      link: default: the link inside a slice of this machine's chips. If its figures are unknown, as for a CPU, the
        algorithm with the fewest bytes is chosen, and among those the one with the fewest rounds.

    Examples:
      >>> from meshpar.mesh.hardware import LINKS
      >>> link = LINKS["TPU v5e"].inside
      >>> select("all_reduce", 16, 1 << 10, link), select("all_reduce", 16, 1 << 30, link)
      ('recursive_doubling', 'bidirectional_ring')
    """
    link = link or here()
    plans: dict[Algorithm, Plan] = {name: plan(operation, name, num_ranks) for name in algorithms(operation)}
    if link is None:
        return min(plans, key=lambda name: (plans[name].sent_bytes(num_bytes), plans[name].num_rounds))
    return min(plans, key=lambda name: seconds(plans[name], num_bytes, link))


def seconds(of: Plan, num_bytes: int, link: Link) -> float:
    """The time in seconds of a plan for a buffer of S = `num_bytes`, by a model of latency and bandwidth.

    A message costs a latency for each hop, and its bytes over the link's bandwidth. A round lasts as long as its
    busiest link.

    >>> from meshpar.mesh.hardware import LINKS
    >>> f"{seconds(plan('all_reduce', 'ring', 8), 2**20, LINKS['H100 SXM'].inside) * 1e6:.1f} us"
    '51.7 us'
    """
    hops, chunks = work(of, link.torus)
    return hops * link.latency_s + chunks * num_bytes / of.num_chunks / link.bytes_per_s


@lru_cache(maxsize=1024)
def work(of: Plan, torus: bool) -> tuple[int, int]:
    """Summed over rounds: the longest path in hops, and the chunks on the busiest link."""
    round_work = _on_torus if torus else _on_switch
    rounds = [round_work(round_, of.num_ranks) for round_ in of.rounds]
    return sum(hops for hops, _ in rounds), sum(chunks for _, chunks in rounds)


def _on_switch(round_: Round, num_ranks: int) -> tuple[int, int]:
    sent, received = np.zeros((2, num_ranks), int)
    for permute in round_:
        sent[permute.source] += permute.chunks.shape[1]
        received[permute.target] += permute.chunks.shape[1]
    return 1, int(max(sent.max(), received.max()))


def _on_torus(round_: Round, num_ranks: int) -> tuple[int, int]:
    hops = 0
    load = np.zeros((2, 2 * num_ranks + 1), int)  # by direction: chunks that enter at a link, less those that have left
    for permute in round_:
        right = (permute.target - permute.source) % num_ranks
        for way, start, distance in ((0, permute.source, right), (1, -permute.source % num_ranks, num_ranks - right)):
            shorter = distance * 2 <= num_ranks if way == 0 else distance * 2 < num_ranks
            np.add.at(load[way], start[shorter], permute.chunks.shape[1])
            np.add.at(load[way], (start + distance)[shorter], -permute.chunks.shape[1])
            hops = max(hops, int(distance[shorter].max(initial=0)))
    on_links = load.cumsum(axis=1)[:, :-1]
    return hops, int((on_links[:, :num_ranks] + on_links[:, num_ranks:]).max())


def here() -> Link | None:
    """The link inside a slice of this machine's chips; None if its figures are unknown."""
    chip = chip_of(jax.devices()[0])
    return LINKS[chip.name].inside if chip and chip.name in LINKS else None
