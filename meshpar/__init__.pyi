from .adopt import training
from .errors import (
    CheckpointError,
    ConfigError,
    ContractError,
    ContractWarning,
    DataError,
    MeshError,
    MeshparError,
    ProgramError,
    ProofError,
    ShardingError,
)
from .inspection.compiling import compiling
from .inspection.contract import Contract
from .inspection.finding import Finding, Planned
from .inspection.hlo import Collective, collectives, total_sent_bytes
from .inspection.inspect import Inspection, inspect
from .mesh.layout import MeshLayout
from .mesh.process import simulate
from .models import GPT, Llama
from .proof.prove import prove
from .proof.verdict import Proof
from .run import Prepared, Run, explain, fit, load, prepare
from .serve.generate import Completion, Generated, generate
from .sharding.constrain import constrain
from .sharding.resolve import Placement, resolve
from .sharding.rules import AxisRules
from .sharding.spec import ArraySpec
from .train.data import StandardLibrary, Synthetic, Text
from .train.loss import Tally
from .train.optim import SGD, Adafactor, AdamW, Lion, Muon
from .train.training import Training

__all__ = [
    "GPT",
    "SGD",
    "Adafactor",
    "AdamW",
    "ArraySpec",
    "AxisRules",
    "CheckpointError",
    "Collective",
    "Completion",
    "ConfigError",
    "Contract",
    "ContractError",
    "ContractWarning",
    "DataError",
    "Finding",
    "Generated",
    "Inspection",
    "Lion",
    "Llama",
    "MeshError",
    "MeshLayout",
    "MeshparError",
    "Muon",
    "Placement",
    "Planned",
    "Prepared",
    "ProgramError",
    "Proof",
    "ProofError",
    "Run",
    "ShardingError",
    "StandardLibrary",
    "Synthetic",
    "Tally",
    "Text",
    "Training",
    "collectives",
    "compiling",
    "constrain",
    "explain",
    "fit",
    "generate",
    "inspect",
    "load",
    "prepare",
    "prove",
    "resolve",
    "simulate",
    "total_sent_bytes",
    "training",
]
