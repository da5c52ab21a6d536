"""Loggers that receive the records of a run, in addition to its own file.

>>> from meshpar import loggers
>>> loggers.WandB(mode="offline").project
'meshpar'
"""

from meshpar.records.loggers import MLflow, Prometheus, TensorBoard, WandB

__all__ = ["MLflow", "Prometheus", "TensorBoard", "WandB"]
