"""Context parallelism as PyTorch 2.6 has it: what its ring of attention adds to the work of a step.

Each device has the rows of all heads. It attends to its own keys, then to half as many scores with the keys of each
other device (torch/distributed/tensor/experimental/_attention.py, with `enable_load_balance`, `convert_to_f32` and
`rotate_method` as they are set there). The keys and values of all devices are gathered for the forward, and again for
the backward, in which the sums of their gradients go once around, in float32. In a compiled block every collective is
waited for where it starts (torch/distributed/_functional_collectives.py).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction

from meshpar.cost.flops import ProductSizes
from meshpar.cost.touched import Touch
from meshpar.cost.traced import Collective
from meshpar.planning.estimate import Operations, Work

CONTEXT = ("context",)
FORWARD = 18
"""Bytes that a step of the forward reads and writes for each element of the queries: keys and values are copied beside
each other (8), and the step's result (2) is added to the sum in float32 (8)."""
BACKWARD = 50
"""The same of the backward: the copies (8); zeros for the kernel's sums of the queries' gradients, the gradients of
weights from results, and the sums rounded (14); the gradients of keys and values added to those that travel (18), and
those of the queries to theirs (10)."""


def around_a_ring(work: Work) -> Work:
    """The work with attention around a ring, in place of Ulysses' kernels, which compute as many scores.

    Keys and values have as many heads as queries: torchtitan repeats them before attention.
    """
    size = work.mesh.shape.get("context", 1)
    if size == 1:
        return work
    products: dict[ProductSizes, float] = defaultdict(float)
    touched: dict[Touch, float] = defaultdict(float, work.computes.touched)
    waits = [one for one in work.waits if (one.axes, one.kind) != (CONTEXT, "all_to_all")]
    for one, times in work.computes.products.items():
        if not one.is_attention:
            products[one] += times
            continue
        local = one.rows // size
        step = replace(one, batch=one.batch * size, rows=local, columns=local // 2, num_flops=one.num_flops // size)
        products[replace(step, columns=local)] += times
        products[step] += times * (size - 1)
        elements = step.batch * local * one.terms
        waits.append(Collective("all_gather", CONTEXT, 2 * 2 * elements * size, size, Fraction(times)))
        is_backward = one.kind == "dot_product_attention_bwd_wrapper"
        if is_backward:
            waits.append(Collective("collective_permute", CONTEXT, 2 * 4 * elements, size, Fraction(times * size)))
        touched[Touch((BACKWARD if is_backward else FORWARD) * elements)] += times * (size - 1)
    return replace(work, computes=Operations(products, touched), waits=waits)
