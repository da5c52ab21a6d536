"""Where the records of a run go beside its own file.

>>> from meshpar import loggers
>>> loggers.WandB(mode="offline").project
'meshpar'
"""

from meshpar.train.records.loggers import MLflow, TensorBoard, WandB

__all__ = ["MLflow", "TensorBoard", "WandB"]
