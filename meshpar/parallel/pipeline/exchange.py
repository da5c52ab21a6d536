"""Layers from where they are stored to the stages that compute with them, and their gradients back.

Stored layers are cut into equal parts in the model's own order, so that a checkpoint knows no pipeline. A schedule
that lays them otherwise (interleaved, like a V, uneven) moves them once a step, in rounds: in each, every stage sends
at most one piece and receives at most one, which is a permute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.parallel.local import Axes, zeros_of
from meshpar.parallel.pipeline.partition import StagePartition

Edge = tuple[int, int, int, int]
"""(stage that stores a piece, its place there, stage that computes with it, its place there)."""


@dataclass(frozen=True)
class Exchange:
    """The rounds.

    Args:
      rounds: the pieces that move in each; no stage sends or receives twice in one.
      unit: layers of a piece.
      stored, computed: layers on a stage, here and there.
    """

    rounds: tuple[tuple[Edge, ...], ...]
    unit: int
    stored: int
    computed: int

    @property
    def num_permutes(self) -> int:
        """Rounds in which anything moves to another stage."""
        return sum(any(edge[0] != edge[2] for edge in one) for one in self.rounds)

    def forward(self, tree: Any, axes: Axes, stage: jax.Array) -> Any:
        """[stored, ...] -> [computed, ...], of each array.

        Communication: a permute of a piece in each round.
        """
        return jax.tree.map(lambda x: self._move(x, self.rounds, self.computed, axes, stage), tree)

    def backward(self, tree: Any, axes: Axes, stage: jax.Array) -> Any:
        """The way back."""
        back = tuple(tuple((c, d, a, b) for a, b, c, d in one) for one in self.rounds)
        return jax.tree.map(lambda x: self._move(x, back, self.stored, axes, stage), tree)

    def _move(self, x: jax.Array, rounds: Any, size: int, axes: Axes, stage: jax.Array) -> jax.Array:
        out, n = zeros_of(jax.typeof(x).update(shape=x.shape[1:]), size), lax.axis_size(axes)
        for one in rounds:
            sent, kept = np.zeros(n, np.int32), np.full(n, -1, np.int32)
            for source, place, target, there in one:
                sent[source], kept[target] = place * self.unit, there * self.unit
            piece = lax.dynamic_slice_in_dim(x, jnp.asarray(sent)[stage], self.unit)
            if any(source != target for source, _, target, _ in one):
                piece = lax.ppermute(piece, axes, [(source, target) for source, _, target, _ in one])
            at = jnp.asarray(kept)[stage]
            put = lambda out, piece, at: lax.dynamic_update_slice_in_dim(out, piece, at, 0)
            out = lax.cond(at >= 0, put, lambda out, *_: out, out, piece, at)
        return out


def exchange(cut: StagePartition, stored: int) -> Exchange:
    """The rounds for a cut of layers of which each stage stores so many; the last, what is left."""
    num_stages = cut.layers.shape[0]
    # A piece is a chunk where chunks are alike and lie together here and there; else a layer.
    unit = cut.longest if cut.is_even and stored % cut.longest == 0 else 1
    own = cut.layers.reshape(num_stages, -1)[:, ::unit]
    edges = [
        (int(layer) // stored, int(layer) % stored // unit, stage, place)
        for stage in range(num_stages) for place, layer in enumerate(own[stage]) if layer >= 0
    ]  # fmt: skip
    return Exchange(tuple(_rounds(edges, num_stages)), unit, stored, cut.layers[0].size)


def _rounds(edges: list[Edge], num_stages: int) -> Iterable[tuple[Edge, ...]]:
    """Largest matchings of those that store with those that compute, until no piece is left; what stays comes first."""
    left = sorted(edges, key=lambda edge: (edge[0] != edge[2], edge))
    while left:
        found = _matching(left, num_stages)
        yield tuple(found)
        left = [edge for edge in left if edge not in found]


def _matching(edges: list[Edge], num_stages: int) -> list[Edge]:
    """A matching with as many edges as can be, by augmenting paths."""
    of_target: dict[int, Edge] = {}

    def augment(source: int, seen: set[int]) -> bool:
        for edge in edges:
            if edge[0] == source and edge[2] not in seen:
                seen.add(edge[2])
                if edge[2] not in of_target or augment(of_target[edge[2]][0], seen):
                    of_target[edge[2]] = edge
                    return True
        return False

    for source in range(num_stages):
        augment(source, set())
    return sorted(of_target.values())
