"""The spec of a batch, read from the first row, and what every other row is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from meshpar.data.rows.source import Row
from meshpar.errors import ConfigError, DataError, Problems, suggestion
from meshpar.sharding.spec import ArraySpec

COUNTED = "counted"
"""The array of a batch that is 1 for each row, and 0 for a row that fills the last batch of an evaluation."""

RANKS = {"b": 0, "u": 1, "i": 1, "f": 2}
"""Kind of dtype -> its rank: numbers of a higher rank do not fit into a lower one."""


@dataclass(frozen=True)
class RowSpec:
    """The arrays of a row.

    Args:
      arrays: name -> shape and dtype in a row.
      bounds: name -> the number of values that its integers may have, from 0 on.
    """

    arrays: Mapping[str, tuple[tuple[int, ...], np.dtype]]
    bounds: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Row, where: str) -> RowSpec:
        """The spec of a first row.

        Raises:
          DataError: lists every value that is no array of numbers.
        """
        problems = Problems()
        arrays = {}
        for name, value in row.items():
            x = _array(value)
            if name == COUNTED:
                problems.add(f"{where}: {name}", "a batch has an array of this name already", "another name")
            elif x is None or x.dtype.kind not in "biuf":
                what = f"is a {type(value).__name__}{'' if x is None else f' of {x.dtype}'}, not an array of numbers"
                problems.add(f"{where}: {name}", what, "encode it as numbers, or leave it out of the row")
            else:
                arrays[name] = (x.shape, np.dtype(jax.dtypes.canonicalize_dtype(x.dtype)))
        if not row:
            problems.add(where, "has no arrays", "return {'image': x, 'label': y}")
        problems.raise_any(DataError, "these rows cannot be trained on:")
        return cls(arrays)

    def batch_specs(self, batch_size: int, dims: Mapping[str, tuple[str, ...]]) -> dict[str, ArraySpec]:
        """The specs of a batch.

        Args:
          dims: array -> the names of its dims in a row; default: no names.

        Raises:
          ConfigError: lists every name in `dims` without an array, and every wrong number of names.
        """
        problems = Problems()
        for name, names in dims.items():
            if name not in self.arrays:
                fix = suggestion(name, self.arrays, f"the arrays are {', '.join(self.arrays)}")
                problems.add(f"data.dims.{name}", "the rows have no such array", fix)
            elif len(names) != len(self.arrays[name][0]):
                shape = list(self.arrays[name][0])
                problems.add(f"data.dims.{name}", f"{len(names)} names for {shape}", "a name for each dim of a row")
        problems.raise_any(ConfigError, "the names of the data's dims are wrong:")
        specs = {COUNTED: ArraySpec((batch_size,), np.dtype("int32"), ("batch",))}
        for name, (shape, dtype) in self.arrays.items():
            specs[name] = ArraySpec((batch_size, *shape), dtype, ("batch", *dims.get(name, ("",) * len(shape))))
        return specs

    def zeros(self) -> dict[str, np.ndarray]:
        """A row that does not count."""
        return {name: np.zeros(shape, dtype) for name, (shape, dtype) in self.arrays.items()}

    def checked(self, row: Row, where: str) -> dict[str, np.ndarray]:
        """The arrays of a row, in their dtypes.

        Raises:
          DataError: lists everything in which the row differs from the first.
        """
        problems = Problems()
        arrays = {}
        for name in (name for name in row if name not in self.arrays):
            problems.add(f"{where}: {name}", "the first row has no such array", "the same arrays in each row")
        for name, (shape, dtype) in self.arrays.items():
            x = _array(row[name]) if name in row else None
            if problem := self._problem(name, x, shape, dtype):
                problems.add(f"{where}: {name}", *problem)
            elif x is not None:
                arrays[name] = x.astype(dtype, copy=False)
        problems.raise_any(DataError, "this row cannot be trained on:")
        return arrays

    def _problem(
        self, name: str, x: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype
    ) -> tuple[str, str] | None:
        """What is wrong with an array of a row, and the fix."""
        if x is None:
            return "is missing, or no array", "the arrays of the first row in each row"
        if x.shape != shape:
            return f"has the shape {list(x.shape)}, and {list(shape)} in the first row", "crop or pad it to one shape"
        if x.dtype.kind not in "biuf" or RANKS[x.dtype.kind] > RANKS[dtype.kind]:
            return f"is {x.dtype}, and {dtype} in the first row", f"x.astype({str(dtype)!r})"
        if x.dtype.kind in "iu" and dtype.kind in "iu" and x.size and x.dtype != dtype:
            info = np.iinfo(dtype)
            if x.min() < info.min or x.max() > info.max:
                return f"has {x.min()} to {x.max()}, beyond {dtype}", "smaller numbers, or JAX's 64-bit mode"
        if (bound := self.bounds.get(name)) and x.size and (x.min() < 0 or x.max() >= bound):
            wrong = int(x.min()) if x.min() < 0 else int(x.max())
            fix = f"a model with more than {wrong} outputs, or other labels" if wrong > 0 else "labels from 0 on"
            return f"is {wrong}, and the model has the {bound} classes 0 to {bound - 1}", fix
        return None


def _array(value: Any) -> np.ndarray | None:
    try:
        return np.asarray(value)
    except Exception:  # of another library
        return None
