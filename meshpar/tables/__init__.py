"""Embedding tables that are sharded over devices, with pull and push of single rows.

>>> from meshpar import tables
>>> items = tables.Table(num_rows=1000, width=16, capacity=64, optim={"kind": "row_adagrad", "lr": 0.1})
>>> items.consistency.kind
'sync'
"""

from meshpar.tables.consistency import Async, Stale, Sync
from meshpar.tables.optim import LazyAdam, RowAdagrad
from meshpar.tables.placement import init, struct
from meshpar.tables.state import Pulled, TableState
from meshpar.tables.table import Table
from meshpar.tables.training import TableTraining, training

__all__ = [
    "Async", "LazyAdam", "Pulled", "RowAdagrad", "Stale", "Sync", "Table", "TableState", "TableTraining", "init",
    "struct", "training",
]  # fmt: skip
