"""Time of the executor over that of a ring all-reduce unrolled by hand, on 8 simulated devices.

python -m tests.collectives.ratio
"""

from __future__ import annotations

import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshpar.collectives import all_reduce


def by_hand(x: jax.Array) -> jax.Array:
    """A ring all-reduce by hand: partial sums go round the ring, and then the finished chunks do."""
    n = lax.axis_size("x")
    rank = lax.axis_index("x")
    right = [(i, (i + 1) % n) for i in range(n)]
    chunks = x.reshape(n, -1)

    def chunk(i):
        return lax.dynamic_index_in_dim(chunks, i % n, keepdims=False)

    total = chunk(rank)
    for turn in range(1, n):
        total = lax.ppermute(total, "x", right) + chunk(rank - turn)
    whole = jnp.zeros_like(chunks)
    for turn in range(n):
        whole = lax.dynamic_update_index_in_dim(whole, total, (rank + 1 - turn) % n, 0)
        total = lax.ppermute(total, "x", right) if turn < n - 1 else total
    return whole.reshape(x.shape)


def ratio(num_floats: int, num_turns: int) -> float:
    """The executor's median time over that of `by_hand`; the two run alternately."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones((8, num_floats)), jax.NamedSharding(mesh, P("x")))
    ring = partial(all_reduce, axes="x", algorithm="ring")
    specs = {"in_specs": P("x"), "out_specs": P("x")}
    programs = [
        jax.jit(jax.shard_map(lambda x, body=body: body(x[0])[None], mesh=mesh, **specs)) for body in (ring, by_hand)
    ]
    assert jnp.array_equal(*(program(x) for program in programs))
    times: list[list[float]] = [[], []]
    for _ in range(num_turns):
        for program, seconds in zip(programs, times, strict=True):
            start = time.perf_counter()
            program(x).block_until_ready()
            seconds.append(time.perf_counter() - start)
    return statistics.median(times[0]) / statistics.median(times[1])


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    for num_floats in (1 << 14, 1 << 18, 1 << 21):
        print(f"{4 * num_floats / 2**20:.2f} MiB: {ratio(num_floats, 30):.3f}")
