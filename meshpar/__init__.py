"""meshpar: declare a mesh and a name for each dim; train on any layout of devices, with the same numbers."""

from meshpar.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MeshError,
    MeshparError,
    ProgramError,
    ShardingError,
)
from meshpar.inspect.hlo import Collective, collectives, total_sent_bytes
from meshpar.mesh.layout import MeshLayout
from meshpar.mesh.process import simulate
from meshpar.models import GPT, Llama
from meshpar.run import Prepared, Run, explain, load, prepare, train
from meshpar.sharding.constrain import constrain
from meshpar.sharding.resolve import Placement, resolve
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.train.data import StandardLibrary, Synthetic, Text
from meshpar.train.optim import SGD, Adafactor, AdamW, Lion, Muon

__all__ = [
    "GPT",
    "SGD",
    "Adafactor",
    "AdamW",
    "ArraySpec",
    "AxisRules",
    "CheckpointError",
    "Collective",
    "ConfigError",
    "DataError",
    "Lion",
    "Llama",
    "MeshError",
    "MeshLayout",
    "MeshparError",
    "Muon",
    "Placement",
    "Prepared",
    "ProgramError",
    "Run",
    "ShardingError",
    "StandardLibrary",
    "Synthetic",
    "Text",
    "collectives",
    "constrain",
    "explain",
    "load",
    "prepare",
    "resolve",
    "simulate",
    "total_sent_bytes",
    "train",
]
