"""Animates the table of a collective: its messages move from device to device."""

from __future__ import annotations

import numpy as np

from meshpar.collectives import Plan

CORNERS = [(40, 40), (260, 40), (260, 200), (40, 200)]
SIZE, STEP = 28, 32
WIDTH, HEIGHT = 440, 290
CHUNK, MESSAGE = "#4c78a8", "#f58518"
CAPTION = "light: one term; dark: the sum of all four; empty: passed on"


def animated(plan: Plan, ink: str) -> list[str]:
    """The elements of an SVG, for a plan of four ranks and chunks of one unit each."""
    shades, moves = stages(plan)
    drawn = [f'<text x="40" y="274" {font(ink)}>{CAPTION}</text>']
    for rank, (x, y) in enumerate(CORNERS):
        drawn.append(f'<text x="{x}" y="{y - 8}" {font(ink)}>device {rank}</text>')
        drawn += [
            square(x + STEP * chunk, y, [terms[rank, chunk] / plan.num_ranks for terms in shades], ink)
            for chunk in range(plan.num_chunks)
        ]
    return drawn + [message(*move, plan.num_rounds) for move in moves]


def stages(plan: Plan) -> tuple[list[np.ndarray], list[tuple[int, int, int, int]]]:
    """How many terms each chunk of each rank has, [ranks, chunks], before each round and at the end; and each message
    as (round, source, target, chunk)."""
    shades = [np.ones((plan.num_ranks, plan.num_chunks), int)]
    moves = []
    for number, permutes in enumerate(plan.rounds):
        terms = shades[-1].copy()
        for permute in permutes:
            for source, target, (chunk,) in zip(permute.source, permute.target, permute.chunks, strict=True):
                before = shades[-1][target, chunk] if permute.adds else 0
                terms[target, chunk] = before + shades[-1][source, chunk]
                if not permute.keeps:
                    terms[source, chunk] = 0
                moves.append((number, source, target, chunk))
        shades.append(terms)
    return shades, moves


def square(x: int, y: int, shades: list[float], ink: str) -> str:
    """A chunk of a rank, which is darker the more terms its sum has."""
    total = len(shades) + 1
    times = ";".join(f"{(i + 1) / total if i else 0:.4f}" for i in range(len(shades)))
    values = ";".join(f"{shade:.2f}" for shade in shades)
    timing = f'calcMode="discrete" values="{values}" keyTimes="{times}" dur="{total}s" repeatCount="indefinite"'
    return (
        f'<rect x="{x}" y="{y}" width="{SIZE}" height="{SIZE}" stroke="{ink}" fill="{CHUNK}" fill-opacity=".25">'
        f'<animate attributeName="fill-opacity" {timing}/></rect>'
    )


def message(number: int, source: int, target: int, chunk: int, rounds: int) -> str:
    """A chunk on its way in one round."""
    total = rounds + 2
    start, end = (number + 1) / total, (number + 2) / total
    timing = f'dur="{total}s" repeatCount="indefinite"'
    moved = []
    for place, name in enumerate("xy"):
        a, b = (CORNERS[rank][place] + STEP * chunk * (place == 0) for rank in (source, target))
        keys = f'values="{a};{a};{b};{b}" keyTimes="0;{start:.4f};{end:.4f};1"'
        moved.append(f'<animate attributeName="{name}" {keys} {timing}/>')
    seen = f'calcMode="discrete" values="0;.8;0" keyTimes="0;{start:.4f};{end:.4f}"'
    moved.append(f'<animate attributeName="opacity" {seen} {timing}/>')
    return f'<rect width="{SIZE}" height="{SIZE}" fill="{MESSAGE}" opacity="0">{"".join(moved)}</rect>'


def font(ink: str) -> str:
    return f'font-family="sans-serif" font-size="13" fill="{ink}"'
