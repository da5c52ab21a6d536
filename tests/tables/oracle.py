"""Tables in NumPy: whole, on one device, written from the papers. Programs are compared with it."""

from __future__ import annotations

import numpy as np

from meshpar.tables import LazyAdam, RowAdagrad, Table


class Reference:
    """A table that gets the pushes of n devices.

    Args:
      rows: float64 [num_rows, width], the first values.
    """

    def __init__(self, table: Table, rows: np.ndarray):
        self.rows = rows.copy()
        self.table = table
        self.late: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        self.step = 0
        self.sums = np.zeros(len(rows))
        self.mean = np.zeros_like(rows)
        self.square = np.zeros_like(rows)
        self.count = np.zeros(len(rows), int)

    def pull(self, ids: np.ndarray) -> np.ndarray:
        return np.where((ids >= 0)[..., None], self.rows[ids], 0)

    def push(self, ids: np.ndarray, grads: np.ndarray, delays: np.ndarray) -> set[int]:
        """One step. Returns the rows that were updated.

        Args:
          ids: int [n, N], by device.
          grads: [n, N, width].
          delays: int [n].
        """
        for device, delay in enumerate(delays):
            self.late.setdefault(self.step + int(delay), []).append((ids[device], grads[device]))
        total: dict[int, np.ndarray] = {}
        for of_device, grad in self.late.pop(self.step, []):
            for row, g in zip(of_device.ravel().tolist(), grad.reshape(-1, grad.shape[-1]), strict=True):
                if row >= 0:
                    total[row] = total.get(row, 0) + g
        for row, g in total.items():
            self.update(row, g)
        self.step += 1
        return set(total)

    def update(self, row: int, g: np.ndarray) -> None:
        optim = self.table.optim
        if isinstance(optim, RowAdagrad):
            self.sums[row] += (g * g).mean()
            self.rows[row] -= optim.lr * g / (np.sqrt(self.sums[row]) + optim.eps)
            return
        assert isinstance(optim, LazyAdam)
        self.count[row] += 1
        self.mean[row] = optim.b1 * self.mean[row] + (1 - optim.b1) * g
        self.square[row] = optim.b2 * self.square[row] + (1 - optim.b2) * g * g
        mean = self.mean[row] / (1 - optim.b1 ** self.count[row])
        square = self.square[row] / (1 - optim.b2 ** self.count[row])
        self.rows[row] -= optim.lr * mean / (np.sqrt(square) + optim.eps)
