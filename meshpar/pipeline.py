"""Pipeline schedules.

>>> from meshpar import pipeline
>>> [op.kind for op in pipeline.OneFOneB(num_microbatches=2).order(stage=1, num_stages=2)]
['F', 'B', 'F', 'B']
"""

from meshpar.parallel.pipeline.schedule import (
    ZBV,
    GPipe,
    Interleaved,
    OneFOneB,
    PipeDream2BW,
    ScheduleFile,
    ZeroBubbleH1,
    ZeroBubbleH2,
)

__all__ = [
    "ZBV", "GPipe", "Interleaved", "OneFOneB", "PipeDream2BW", "ScheduleFile", "ZeroBubbleH1", "ZeroBubbleH2",
]  # fmt: skip
