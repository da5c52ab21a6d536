"""Measures what it costs to compute a matrix product in chunks, without communication.

    python scripts/bench_matmul.py [--size 8192] [--chunks 8] [--dtype bfloat16] [--rounds 20]

Chunks of rows or columns yield parts of the result, as in `all_gather_matmul`; chunks of the contracted dim are
summed in float32. The whole product and the chunked ones alternate; a line of JSON contains the ratios of the
medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def whole(x, w):
    return x @ w


def chunked(x, w, by: str, num: int):
    dims = {"rows": (0, None, 0), "columns": (None, 1, 1), "contracted": (1, 0, None)}[by]
    size = x.shape[0] // num

    def cut(a, dim, i):
        return a if dim is None else lax.dynamic_slice_in_dim(a, i * size, size, dim)

    y = jnp.zeros(x.shape, x.dtype if dims[2] is not None else jnp.float32)
    for chunk in range(num):
        i = lax.rem(jnp.int32(chunk + 1), jnp.int32(num))
        part = jnp.matmul(cut(x, dims[0], i), cut(w, dims[1], i), preferred_element_type=y.dtype)
        y = y + part if dims[2] is None else lax.dynamic_update_slice_in_dim(y, part, i * size, dims[2])
        # In sequence, as chunks arrive from a ring.
        y, x, w = lax.optimization_barrier((y, x, w))
    return y.astype(x.dtype)


def seconds(f, *args) -> float:
    start = time.perf_counter()
    jax.block_until_ready(f(*args))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    shape = (arguments.size, arguments.size)
    x, w = (jax.random.normal(jax.random.key(i), shape, jnp.dtype(arguments.dtype)) for i in range(2))
    ways = {by: partial(chunked, by=by, num=arguments.chunks) for by in ("rows", "columns", "contracted")}
    programs = {name: jax.jit(f) for name, f in ({"whole": whole} | ways).items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for round_ in range(arguments.rounds + 3):
        for name, program in programs.items():
            took = seconds(program, x, w)
            if round_ >= 3:
                times[name].append(took)
    medians = {name: statistics.median(took) for name, took in times.items()}
    setting = {"device": jax.devices()[0].device_kind, "size": arguments.size, "dtype": arguments.dtype}
    ratios = {f"{by}_ratio": round(medians[by] / medians["whole"], 4) for by in ways}
    print(json.dumps(setting | {"whole_s": medians["whole"]} | ratios))


if __name__ == "__main__":
    main()
