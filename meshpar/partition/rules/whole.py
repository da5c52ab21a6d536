"""Operations on whole arrays: keys, and matrices whose last dims belong together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshpar.partition.rules.rule import Rule, same, signed
from meshpar.partition.signature import Signature


def whole(eqn: Any) -> Signature:
    """Every device computes all of it."""
    ins = tuple((None,) * v.aval.ndim for v in eqn.invars)
    return Signature(ins, tuple((None,) * v.aval.ndim for v in eqn.outvars), same(eqn))


def of_matrices(num_dims: int) -> Callable[[Any], Signature]:
    """An operation on the last dims, which are whole; the leading ones, a batch, may be sharded."""

    def signature(eqn: Any) -> Signature:
        leading = eqn.invars[0].aval.ndim - num_dims

        def labels(v: Any) -> tuple[Any, ...]:
            return tuple(i if i < leading else None for i in range(v.aval.ndim))

        return Signature(tuple(map(labels, eqn.invars)), tuple(map(labels, eqn.outvars)), same(eqn))

    return signature


def fft(eqn: Any) -> Signature:
    return of_matrices(len(eqn.params["fft_lengths"]))(eqn)


KEYS = (
    "random_seed random_wrap random_unwrap random_fold_in random_split random_clone random_gamma threefry2x32 "
    "rng_bit_generator platform_index"
)
MATRICES = (
    "cholesky eigh eig lu qr geqrf householder_product svd triangular_solve schur tridiagonal lu_pivots_to_permutation"
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(KEYS.split(), signed(whole)),
    **dict.fromkeys(MATRICES.split(), signed(of_matrices(2))),
    "lu_pivots_to_permutation": signed(of_matrices(1)),
    "householder_product": signed(whole),
    "fft": signed(fft),
}
