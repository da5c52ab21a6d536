"""Exports of trained models, which other programs run without meshpar.

>>> from pathlib import Path
>>> from meshpar import export
>>> export.stablehlo(Path("runs/none"), Path("out"))  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
meshpar.errors.CheckpointError: ...runs/none does not exist
"""

from meshpar.export.onnx_graph import onnx
from meshpar.export.stablehlo_program import function, stablehlo

__all__ = ["function", "onnx", "stablehlo"]
