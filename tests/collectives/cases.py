"""The result of each collective on lists of NumPy blocks; programs and their transposes are compared with it.

JAX_NUM_CPU_DEVICES=9 python -m tests.collectives.cases     # the whole sweep, groups of 2 to 9
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any, NamedTuple

import jax
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshpar import collectives
from meshpar.collectives.algorithms import ALGORITHMS, operations

PAIRS = [(operation, algorithm) for algorithm in ALGORITHMS for operation in operations(algorithm)]
ROOTED = ("broadcast", "scatter", "gather", "reduce")
TRANSPOSED = {
    "broadcast": "reduce", "reduce": "broadcast", "scatter": "gather", "gather": "scatter",
    "all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
}  # fmt: skip


class Case(NamedTuple):
    operation: str
    algorithm: str
    mesh: tuple[int, ...]
    axes: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    root: int = 0

    @property
    def size(self) -> int:
        """n, the ranks of a group."""
        return math.prod(self.mesh["abc".index(axis)] for axis in self.axes)


def reference(operation: str, xs: list[np.ndarray], root: int) -> list[np.ndarray]:
    """The array of each rank after the operation."""
    n = len(xs)
    whole = sum(xs[1:], xs[0])
    zeros = [np.zeros_like(x) for x in xs]
    if operation in ("all_gather", "gather"):
        joined = np.concatenate(xs)
        return [joined if operation == "all_gather" or r == root else np.zeros_like(joined) for r in range(n)]
    if operation == "all_to_all":
        return [np.concatenate([np.split(x, n)[r] for x in xs]) for r in range(n)]
    return {
        "broadcast": lambda: [xs[root]] * n,
        "scatter": lambda: np.split(xs[root], n),
        "reduce": lambda: [whole if r == root else zeros[r] for r in range(n)],
        "reduce_scatter": lambda: np.split(whole, n),
        "all_reduce": lambda: [whole] * n,
    }[operation]()


def check(case: Case) -> None:
    """Compares a program, and its transpose, with the reference in every group of the mesh."""
    names = tuple("abc")[: len(case.mesh)]
    devices = jax.devices()[: math.prod(case.mesh)]
    mesh = jax.make_mesh(case.mesh, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)
    divisible = case.operation in ("scatter", "reduce_scatter", "all_to_all")
    shape = (case.shape[0] * case.size, *case.shape[1:]) if divisible else case.shape
    draw = np.random.default_rng(math.prod(shape)).integers
    call = getattr(collectives, case.operation)
    options = {"root": case.root} if case.operation in ROOTED else {}

    def local(x: jax.Array) -> jax.Array:
        return call(x[0], case.axes, algorithm=case.algorithm, **options)[None]

    program = jax.shard_map(local, mesh=mesh, in_specs=P(names), out_specs=P(names))
    x = draw(-9, 9, (mesh.size, *shape)).astype(case.dtype)
    if case.dtype == "int32":
        compare(case, case.operation, x, jax.jit(program)(x))
        return

    def both(x: jax.Array, grad: jax.Array) -> Any:
        y, transpose = jax.vjp(program, x)
        return y, *transpose(grad)

    grad = draw(-9, 9, jax.eval_shape(program, x).shape).astype(case.dtype)
    y, back = jax.jit(both)(x, grad)
    compare(case, case.operation, x, y)
    compare(case, TRANSPOSED[case.operation], grad, back)


def compare(case: Case, operation: str, inputs: np.ndarray, outputs: Any) -> None:
    inputs = np.asarray(inputs, "float64").reshape(*case.mesh, *inputs.shape[1:])
    outputs = np.asarray(outputs, "float64").reshape(*case.mesh, *outputs.shape[1:])
    for ranks in groups(case):
        expected = reference(operation, [inputs[place] for place in ranks], case.root)
        for rank, place in enumerate(ranks):
            np.testing.assert_array_equal(outputs[place], expected[rank], f"{case} {operation}, rank {rank}")


def groups(case: Case) -> list[list[tuple[int, ...]]]:
    """The groups of a mesh, each a list of its ranks' coordinates: the first of the axes varies slowest."""
    sizes = dict(zip("abc", case.mesh, strict=False))
    others = [name for name in sizes if name not in case.axes]

    def index(axes):
        return [dict(zip(axes, at, strict=True)) for at in product(*(range(sizes[axis]) for axis in axes))]

    def place(at):
        return tuple(at[name] for name in sizes)

    return [[place(fixed | rank) for rank in index(case.axes)] for fixed in index(others)]


LAYOUTS = [((n,), ("a",)) for n in range(2, 10)] + [
    ((2, 3), ("b", "a")), ((2, 3), ("a", "b")), ((2, 4), ("b",)), ((3, 2), ("a",)), ((2, 2, 2), ("c", "a")),
]  # fmt: skip


@st.composite
def cases(draw: Any) -> Case:
    operation, algorithm = draw(st.sampled_from(PAIRS))
    mesh, axes = draw(st.sampled_from([layout for layout in LAYOUTS if math.prod(layout[0]) <= jax.device_count()]))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "int32"]))
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    case = Case(operation, algorithm, mesh, axes, dtype, shape)
    return case._replace(root=draw(st.integers(0, case.size - 1)) if operation in ROOTED else 0)


def sweep(num_examples: int) -> None:
    """Checks `num_examples` random cases."""

    @settings(max_examples=num_examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(cases())
    def run(case: Case) -> None:
        check(case)

    run()


if __name__ == "__main__":
    for case_ in [Case(*pair, (n,), ("a",), "float32", (5,), n - 1) for pair in PAIRS for n in range(2, 10)]:
        check(case_._replace(root=case_.root if case_.operation in ROOTED else 0))
    sweep(400)
    print("every case equals its reference")
