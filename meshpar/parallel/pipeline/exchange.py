"""Moves layers from the stages that store them to the stages that compute with them, and their gradients back.

Layers are stored in equal parts in the model's order, so checkpoints do not depend on the schedule. For a schedule with
another placement (interleaved, V-shaped, uneven) they are moved in rounds: once for many steps, see
`train.stored_layers`, or else in each step. In a round every stage sends at most one piece and receives at most one, so
a round is a permute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.collectives.permute import permute
from meshpar.mesh.varying import Axes
from meshpar.parallel.local import zeros_of
from meshpar.parallel.pipeline.partition import StagePartition

Edge = tuple[int, int, int, int]
"""(stage that stores a piece, its index there, stage that computes with it, its index there)."""


@dataclass(frozen=True)
class Exchange:
    """The rounds in which layers move.

    Args:
      rounds: the pieces that move in each round; in one round no stage sends or receives twice.
      unit: the number of layers in a piece.
      stored, computed: how many layers a stage stores, and computes with.
    """

    rounds: tuple[tuple[Edge, ...], ...]
    unit: int
    stored: int
    computed: int

    def forward(self, tree: Any, axes: Axes, stage: jax.Array) -> Any:
        """[stored, ...] -> [computed, ...], for each array.

        Communication: a permute of one piece in each round.
        """
        return jax.tree.map(lambda x: self._move(x, self.rounds, self.computed, axes, stage), tree)

    def backward(self, tree: Any, axes: Axes, stage: jax.Array) -> Any:
        """[computed, ...] -> [stored, ...], for each array. Communication: as `forward`."""
        back = tuple(tuple((c, d, a, b) for a, b, c, d in edges) for edges in self.rounds)
        return jax.tree.map(lambda x: self._move(x, back, self.stored, axes, stage), tree)

    def _move(self, x: jax.Array, rounds: Any, size: int, axes: Axes, stage: jax.Array) -> jax.Array:
        def put(out: jax.Array, piece: jax.Array, at: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(out, piece, at, 0)

        out = zeros_of(jax.typeof(x).update(shape=x.shape[1:]), size)
        n = lax.axis_size(axes)
        for edges in rounds:
            sent = np.zeros(n, np.int32)
            received = np.full(n, -1, np.int32)  # -1: receives nothing
            for source, sent_from, target, received_at in edges:
                sent[source] = sent_from * self.unit
                received[target] = received_at * self.unit
            piece = lax.dynamic_slice_in_dim(x, jnp.asarray(sent)[stage], self.unit)
            if any(source != target for source, _, target, _ in edges):
                piece = permute(piece, axes, [(source, target) for source, _, target, _ in edges])
            at = jnp.asarray(received)[stage]
            out = lax.cond(at >= 0, put, lambda out, *_: out, out, piece, at)
        return out


def exchange(cut: StagePartition, stored: int) -> Exchange:
    """The exchange for a partition of layers, where each stage stores `stored` layers; the last may store fewer."""
    num_stages = cut.layers.shape[0]
    # A piece is a chunk if all chunks have equal lengths and no chunk is stored on two stages; else it is a layer.
    unit = cut.longest if cut.is_even and stored % cut.longest == 0 else 1
    own = cut.layers.reshape(num_stages, -1)[:, ::unit]
    edges = [
        (int(layer) // stored, int(layer) % stored // unit, stage, place)
        for stage in range(num_stages) for place, layer in enumerate(own[stage]) if layer >= 0
    ]  # fmt: skip
    return Exchange(tuple(_rounds(edges, num_stages)), unit, stored, cut.layers[0].size)


def _rounds(edges: list[Edge], num_stages: int) -> Iterable[tuple[Edge, ...]]:
    """Maximum matchings of sources with targets, until no piece is left. Pieces that stay on their stage come first."""
    left = sorted(edges, key=lambda edge: (edge[0] != edge[2], edge))
    while left:
        found = _matching(left, num_stages)
        yield tuple(found)
        left = [edge for edge in left if edge not in found]


def _matching(edges: list[Edge], num_stages: int) -> list[Edge]:
    """A matching with the most edges, by augmenting paths."""
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
