"""Operations for which there is a rule: name of the primitive -> functions that use it, with their arguments."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.partition.partitioned import partitioned

RNG = np.random.default_rng(0)
KEY = 7


def floats(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape)


def ints(high: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, high, shape).astype(np.int32)


def flags(*shape: int) -> np.ndarray:
    return RNG.random(shape) < 0.5


X = floats(4, 8)
POSITIVE = np.abs(X) + 0.5
UNIT = np.tanh(X) * 0.9
ROWS = floats(4, 8, 2)


@jax.custom_vjp
def clipped(x, y):
    return x * y


clipped.defvjp(lambda x, y: (x * y, (x, y)), lambda res, ct: (jnp.clip(ct * res[1], -0.5, 0.5), ct * res[0]))


@jax.custom_jvp
def soft(x):
    return jnp.log1p(jnp.exp(x))


soft.defjvps(lambda t, out, x: t * jax.nn.sigmoid(x) * 1.5)


TABLE = np.sin(np.arange(8.0))


@jax.custom_vjp
def tabled(x):
    """It closes over a table, which JAX makes an operand without a gradient."""
    return x * TABLE


tabled.defvjp(lambda x: (x * TABLE, None), lambda _, ct: (jnp.clip(ct * TABLE, -0.5, 0.5),))


def looped(w, x, s):
    def body(carry, xs):
        h = jnp.tanh(carry @ w + xs)
        return h, h.sum(-1)

    return lax.scan(body, s, x)


def stored(cache, x, index):
    """Writes a token into each row of a cache; an index beyond the last one is the last one."""
    return jax.vmap(lambda cache, x, i: lax.dynamic_update_slice(cache, x, (i, jnp.int32(0))))(cache, x, index)


def halved(x):
    """Halves each row until it is small: a loop with a condition for each row."""

    def of_row(x):
        return lax.while_loop(lambda c: jnp.abs(c[1]).max() > 0.3, lambda c: (c[0] + 1, c[1] / 2), (0, x))

    return jax.vmap(of_row)(lax.stop_gradient(x))


def bag(table, index):
    return jnp.zeros((4, 8)).at[index % 4].add(table)


@jax.custom_batching.custom_vmap
def batched(x):
    return jnp.sin(x)


batched.def_vmap(lambda size, is_batched, x: (jnp.sin(x), True))


@partial(lax.composite, name="tests.doubled")
def composed(x):
    return x * 2


def reduced(x):
    """JAX does not differentiate it."""
    return x * lax.reduce(lax.stop_gradient(x), 1.0, lambda a, b: a * b + a, (0,))


def windows_of_a_function(x):
    """JAX does not differentiate it."""
    x = lax.stop_gradient(x)
    return lax.reduce_window(x, 2.0, lambda a, b: a * b + a, (1, 2, 1), (1, 2, 1), "VALID")


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -1e30)), v)


UNARY = {
    "abs": (jnp.abs, X), "acos": (jnp.arccos, UNIT), "acosh": (jnp.arccosh, POSITIVE + 1), "asin": (jnp.arcsin, UNIT),
    "asinh": (jnp.arcsinh, X), "atan": (jnp.arctan, X), "atanh": (jnp.arctanh, UNIT),
    "bessel_i0e": (lax.bessel_i0e, X), "bessel_i1e": (lax.bessel_i1e, X),
    "ceil": (jnp.ceil, X), "cos": (jnp.cos, X), "cosh": (jnp.cosh, X), "digamma": (lax.digamma, POSITIVE),
    "erf": (lax.erf, X), "erf_inv": (lax.erf_inv, UNIT), "erfc": (lax.erfc, X), "exp": (jnp.exp, X),
    "exp2": (jnp.exp2, X), "expm1": (jnp.expm1, X), "floor": (jnp.floor, X), "is_finite": (jnp.isfinite, X),
    "lgamma": (lax.lgamma, POSITIVE), "log": (jnp.log, POSITIVE), "log1p": (jnp.log1p, POSITIVE),
    "log2": (jnp.log2, POSITIVE),
    "logistic": (jax.nn.sigmoid, X), "neg": (jnp.negative, X), "not": (jnp.logical_not, flags(4, 8)),
    "population_count": (lax.population_count, ints(99, 4, 8)), "integer_pow": (lambda x: x**3, X),
    "round": (jnp.round, X), "rsqrt": (lax.rsqrt, POSITIVE), "sign": (jnp.sign, X), "sin": (jnp.sin, X),
    "sinh": (jnp.sinh, X), "sqrt": (jnp.sqrt, POSITIVE), "square": (jnp.square, X), "tan": (jnp.tan, UNIT),
    "tanh": (jnp.tanh, X), "stop_gradient": (lambda x: x * lax.stop_gradient(x), X),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 8, 10), X),
    "convert_element_type": (lambda x: x.astype(jnp.float32).astype(jnp.float64), X),
    "bitcast_convert_type": (lambda x: lax.bitcast_convert_type(x, jnp.int64), X),
    "copy": (jnp.copy, X), "real": (lambda x: lax.real(lax.complex(x, x)), X),
    "imag": (lambda x: lax.imag(lax.conj(lax.complex(x, x))), X),
    "name": (lambda x: jax.ad_checkpoint.checkpoint_name(x, "a"), X),
}  # fmt: skip
BINARY = {
    "add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "div": jnp.divide, "max": jnp.maximum,
    "min": jnp.minimum, "atan2": jnp.arctan2, "eq": jnp.equal, "ne": jnp.not_equal, "lt": jnp.less,
    "le": jnp.less_equal, "gt": jnp.greater, "ge": jnp.greater_equal, "rem": lax.rem,
}  # fmt: skip
WORDS = (ints(99, 4, 8), ints(5, 4, 8))
Case = tuple[Any, tuple[np.ndarray, ...]]
OPERATIONS: dict[str, list[Case]] = {
    **{name: [(function, (x,))] for name, (function, x) in UNARY.items()},
    **{name: [(function, (X, floats(4, 8))), (function, (X, floats(1, 8)))] for name, function in BINARY.items()},
    "add_any": [(lambda a, b: jax.vjp(lambda x: (jnp.sin(x), jnp.cos(x)), a)[1]((a, b))[0], (X, floats(4, 8)))],
    "nextafter": [(lambda a, b: jnp.nextafter(lax.stop_gradient(a), lax.stop_gradient(b)), (X, floats(4, 8)))],
    "cbrt": [(jnp.cbrt, (POSITIVE,))],
    "pow": [(jnp.power, (POSITIVE, X))],
    "and": [(jnp.bitwise_and, WORDS)],
    "or": [(jnp.bitwise_or, WORDS)],
    "xor": [(jnp.bitwise_xor, WORDS)],
    "shift_left": [(lax.shift_left, WORDS)],
    "shift_right_arithmetic": [(lax.shift_right_arithmetic, WORDS)],
    "shift_right_logical": [(lax.shift_right_logical, WORDS)],
    "clz": [(lax.clz, (WORDS[0],))],
    "clamp": [(lambda x: lax.clamp(-0.5, x, 0.5), (X,))],
    "select_n": [(jnp.where, (flags(4, 8), X, floats(4, 8)))],
    "complex": [(lambda x, y: jnp.abs(lax.complex(x, y)), (X, floats(4, 8)))],
    "conj": [(lambda x, y: lax.real(lax.conj(lax.complex(x, y))), (X, floats(4, 8)))],
    "igamma": [(lambda x: lax.igamma(2.0 * jnp.ones_like(x), x), (POSITIVE,))],
    "igammac": [(lambda x: lax.igammac(2.0 * jnp.ones_like(x), x), (POSITIVE,))],
    "polygamma": [(lambda x: lax.polygamma(jnp.ones_like(x), x), (POSITIVE,))],
    "zeta": [(lambda x: lax.zeta(lax.stop_gradient(x) + 1.5, jnp.ones_like(x)), (POSITIVE,))],
    "dot_general": [
        (jnp.matmul, (X, floats(8, 4))),
        (lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (floats(2, 4, 8), floats(2, 4, 8))),
        (lambda a, b: jnp.einsum("ij,kj->ik", a, b), (X, floats(4, 8))),
        (lambda x, w, v: jnp.tanh(x @ w) @ v, (X, floats(8, 4), floats(4, 8))),
        (lambda x, w, s: (x @ w) * s, (X, floats(8, 4), floats(1, 4))),
        (attention, (floats(4, 4, 2, 4), floats(4, 4, 2, 4), floats(4, 4, 2, 4))),
    ],
    "conv_general_dilated": [
        (lambda x, k: lax.conv(x, k, (1, 1), "SAME"), (floats(4, 4, 6, 6), floats(8, 4, 3, 3))),
        (
            lambda x, k: lax.conv_general_dilated(x, k, (2,), "SAME", feature_group_count=4),
            (floats(4, 4, 8), floats(4, 1, 3)),
        ),
        (
            lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME", feature_group_count=2),
            (floats(4, 4, 8), floats(4, 2, 3)),
        ),
        (lambda x, k: lax.conv_transpose(x, k, (2, 2), "SAME"), (floats(4, 4, 4, 4), floats(3, 3, 4, 8))),
    ],
    "ragged_dot_general": [
        (lambda x, w: lax.ragged_dot(x, w, jnp.array([3, 5], jnp.int32)), (floats(8, 4), floats(2, 4, 4)))
    ],
    "reduce_sum": [
        (lambda x: x.sum(1), (X,)),
        (lambda x: (x.sum() - 1) ** 2, (X,)),
        (lambda x: x.mean(0) * 2, (ROWS,)),
    ],
    "reduce_max": [(lambda x: x.max(1), (X,)), (lambda x: x.max(), (X,)), (lambda x: x.max((0, 2)), (np.round(ROWS),))],
    "reduce_min": [(lambda x: x.min(0), (X,)), (lambda x: x.min(), (np.round(X),))],
    "reduce_or": [(lambda x: x.any(1), (flags(4, 8),))],
    "reduce_and": [(lambda x: x.all(0), (flags(4, 8),))],
    "reduce_xor": [(lambda x: lax.reduce_xor_p.bind(x, axes=(0,)), (ints(9, 4, 8),))],
    "reduce_prod": [(lambda x: x.prod(1), (X,))],
    "argmax": [(lambda x: x.argmax(1), (X,))],
    "argmin": [(lambda x: x.argmin(0), (X,))],
    "cumsum": [(lambda x: x.cumsum(1), (X,))],
    "cumprod": [(lambda x: x.cumprod(0), (POSITIVE,))],
    "cummax": [(lambda x: lax.cummax(x, 1), (X,))],
    "cummin": [(lambda x: lax.cummin(x, 1), (X,))],
    "cumlogsumexp": [(lambda x: lax.cumlogsumexp(x, 1), (X,))],
    "sort": [(lambda x: jnp.sort(x, 1), (X,)), (lambda x, y: lax.sort((x, y), num_keys=1), (X, floats(4, 8)))],
    "top_k": [(lambda x: lax.top_k(x, 3), (X,))],
    "reduce_window": [(windows_of_a_function, (ROWS,))],
    "psum": [(jax.vmap(lambda x: x - lax.pmean(x, "rows"), axis_name="rows"), (X,))],
    "pmax": [(jax.vmap(lambda x: x / lax.pmax(lax.stop_gradient(x), "rows"), axis_name="rows"), (POSITIVE,))],
    "pmin": [(jax.vmap(lambda x: x / lax.pmin(lax.stop_gradient(x), "rows"), axis_name="rows"), (POSITIVE,))],
    "reduce_window_sum": [
        (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 1), (1, 2, 1), "VALID"), (ROWS,))
    ],
    "reduce_window_max": [
        (lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 3, 1), (1, 2, 1), "SAME"), (ROWS,))
    ],
    "reduce_window_min": [
        (lambda x: lax.reduce_window(x, np.inf, lax.min, (1, 2, 1), (1, 2, 1), "VALID"), (ROWS,))
    ],
    "select_and_scatter_add": [
        (
            lambda x: jax.grad(
                lambda x: (lax.reduce_window(x, -np.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID") ** 2).sum()
            )(x).astype(jnp.float32).astype(int),
            (ROWS,),
        )
    ],
    "broadcast_in_dim": [(lambda x: jnp.broadcast_to(x[:, None], (4, 2, 8)) * 2, (X,))],
    "transpose": [(lambda x: x.transpose(2, 0, 1), (ROWS,))],
    "squeeze": [(lambda x: jnp.squeeze(x, 1), (floats(4, 1, 8),))],
    "reshape": [
        (lambda x: x.reshape(32), (X,)),
        (lambda x: x.reshape(4, 2, 4), (X,)),
        (lambda x: x.reshape(4, 16), (ROWS,)),
        (lambda x: x.reshape(2, 2, 16), (ROWS,)),
        (lambda x: jnp.tanh(jnp.arange(8.0).reshape(2, 4)[0].sum() * x.reshape(1, 4, 8, 1)), (X,)),
    ],
    "slice": [(lambda x: x[1:3], (X,)), (lambda x: x[:, ::2], (X,))],
    "split": [(lambda x: jnp.split(x, 2, 1), (X,))],
    "concatenate": [(lambda x, y: jnp.concatenate([x, y], 0), (X, floats(4, 8)))],
    "stack": [(lambda x, y: jnp.stack([x, y], 1), (X, floats(4, 8)))],
    "tile": [(lambda x: jnp.tile(x, (1, 2)), (X,)), (lambda x: jnp.tile(x, (4, 1)), (floats(1, 8),))],
    "pad": [(lambda x: jnp.pad(x, ((0, 0), (1, 2))), (X,))],
    "rev": [(lambda x: x[::-1], (X,))],
    "dynamic_slice": [(lambda x: lax.dynamic_slice(x, (jnp.int32(1), jnp.int32(0)), (2, 8)), (X,))],
    "dynamic_update_slice": [
        (lambda x, y: lax.dynamic_update_slice(x, y, (jnp.int32(1), jnp.int32(0))), (X, floats(2, 8)))
    ],
    "gather": [
        (lambda t, i: jnp.take(t, i, 0), (X, ints(4, 4, 2))),
        (lambda t, i: jnp.take(t, i, 0, mode="clip"), (X, ints(9, 4, 2) - 2)),
        (lambda t, i: jnp.take(t, i, 0, mode="fill", fill_value=3.0), (X, ints(9, 4, 2) - 2)),
        (lambda t, i: jnp.take_along_axis(t, i, 1), (X, ints(8, 4, 2))),
        (lambda t, i: t[jnp.arange(4), i], (X, ints(8, 4))),
        (lambda t, i: t[:, i], (X, ints(8, 4))),
    ],
    "scatter": [
        (lambda t, x, i: t.at[i].set(x), (X, floats(2, 8), np.array([3, 0], np.int32))),
        (stored, (floats(4, 8, 2), floats(4, 1, 2), ints(12, 4))),
    ],
    "scatter-add": [
        (lambda t, x, i: t.at[i].add(x), (X, floats(4, 8), ints(4, 4))),
        (bag, (floats(4, 8), ints(9, 4))),
        (lambda x, i: jax.ops.segment_sum(x, i, 4), (floats(8, 4), ints(4, 8))),
    ],
    "scatter-sub": [(lambda t, x, i: t.at[i].subtract(x), (X, floats(4, 8), ints(4, 4)))],
    "scatter-min": [(lambda t, x, i: t.at[i].min(x), (X, floats(2, 8), np.array([3, 0], np.int32)))],
    "scatter-max": [(lambda t, x, i: t.at[i].max(x), (X, floats(2, 8), np.array([3, 0], np.int32)))],
    "scatter-mul": [
        (lambda t, x, i: t.at[i].multiply(x, unique_indices=True), (X, floats(2, 8), np.array([3, 0], np.int32)))
    ],
    "reduce": [(reduced, (X,))],
    "device_put": [(lambda x: jnp.sin(jax.device_put(x)), (X,))],
    "custom_vmap_call": [(lambda x: x * batched(lax.stop_gradient(x)), (X,))],
    "composite": [(lambda x: x * composed(lax.stop_gradient(x)), (X,))],
    "call_hi_primitive": [(lambda x: x * jnp.searchsorted(jnp.linspace(-1.0, 1.0, 5), x), (X,))],
    "iota": [(lambda x: x * jnp.arange(8), (X,)), (lambda x: x + lax.broadcasted_iota(float, (4, 8), 0), (X,))],
    "random_bits": [
        (lambda x: x * jax.random.bernoulli(jax.random.key(KEY), 0.5, x.shape), (X,)),
        (lambda x: x + jax.random.normal(jax.random.key(KEY), x.shape), (X,)),
        (lambda x: x * jax.random.randint(jax.random.key(KEY), (8,), 0, 9), (X,)),
        (lambda x: x + jax.random.uniform(jax.random.key(KEY), x.shape, jnp.float32).astype(x.dtype), (X,)),
    ],
    "random_split": [
        (lambda x: x + jax.random.uniform(jax.random.split(jax.random.fold_in(jax.random.key(KEY), 3))[1], (8,)), (X,))
    ],
    "jit": [(jax.jit(lambda x: jnp.tanh(x)), (X,))],
    "remat2": [(jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w), (floats(4, 4), floats(4, 4)))],
    "custom_jvp_call": [(jax.nn.relu, (X,)), (soft, (X,))],
    "custom_vjp_call": [
        (clipped, (X, floats(4, 8))),
        (lambda x, y: clipped(x, jnp.broadcast_to(y, x.shape)), (X, floats(8))),
        (tabled, (X,)),
    ],
    "partitioned": [
        (partitioned("b s d, d -> b s d", lambda x, y: x * y), (ROWS.transpose(0, 2, 1), X[0])),
        (partitioned("a b, b c -> a c", jnp.matmul, summed=["b"]), (X, floats(8, 4))),
        (jax.vmap(partitioned("a, a -> a", jnp.multiply), in_axes=(1, None)), (X, X[:, 0])),
    ],
    "optimization_barrier": [(lambda x: lax.optimization_barrier(x * 2), (X,))],
    "scan": [
        (looped, (floats(4, 4), floats(3, 4, 4), floats(4, 4))),
        (lambda w, x: looped(w, x, jnp.zeros((4, 4))), (floats(4, 4), floats(3, 4, 4))),
        (lambda w, x: lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w), (floats(3, 4, 4), floats(4, 4))),
    ],
    "while": [
        (
            lambda x: lax.stop_gradient(
                lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1])), (0, lax.stop_gradient(x)))[1]
            ),
            (X,),
        ),
        (halved, (X,)),
    ],
    "cond": [(lambda x, y: lax.cond(x.sum() > 0, lambda a, b: a @ b.T, lambda a, b: b @ a.T, x, y), (X, floats(4, 8)))],
    "cholesky": [(lambda x: jnp.linalg.cholesky(x @ x.mT + jnp.eye(4)), (floats(4, 4, 4),))],
    "triangular_solve": [
        (
            lambda a, b: lax.linalg.triangular_solve(jnp.tril(a) + 3 * jnp.eye(4), b, left_side=True, lower=True),
            (floats(4, 4, 4), floats(4, 4, 2)),
        )
    ],
    "qr": [(lambda x: jnp.abs(jnp.linalg.qr(x)[1]), (floats(4, 4, 4) + 3 * np.eye(4),))],
    "eigh": [(lambda x: jnp.linalg.eigvalsh(x + x.mT), (floats(4, 4, 4),))],
    "svd": [(lambda x: jnp.linalg.svd(x, compute_uv=False), (floats(4, 4, 4),))],
    "lu": [(lambda x, b: jnp.linalg.solve(x + 3 * jnp.eye(4), b), (floats(4, 4, 4), floats(4, 4, 2)))],
    "fft": [(lambda x: jnp.abs(jnp.fft.fft(x, axis=-1)), (X,))],
    "approx_top_k": [(lambda x: lax.approx_max_k(x, 2)[0], (X,))],
}  # fmt: skip
