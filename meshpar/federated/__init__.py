"""Federated learning: clients as a dim of one SPMD program.

>>> from meshpar import federated
>>> federated.Federated(data="digits", local={"lr": 0.1}, num_rounds=3, run_dir="runs/clients").method.kind
'fedavg'
"""

from meshpar.federated.config import Federated, Local, Stragglers
from meshpar.federated.data import Clients, Clusters, Digits, Dirichlet
from meshpar.federated.federation import Federation, federation
from meshpar.federated.methods import FedAdam, FedAvg, FedProx, Scaffold
from meshpar.federated.model import Classifier, Model, of_flax
from meshpar.federated.privacy import Privacy
from meshpar.federated.run import fit, load
from meshpar.federated.secure import SecureSum

__all__ = [
    "Classifier", "Clients", "Clusters", "Digits", "Dirichlet", "FedAdam", "FedAvg", "FedProx", "Federated",
    "Federation", "Local", "Model", "Privacy", "Scaffold", "SecureSum", "Stragglers", "federation", "fit", "load",
    "of_flax",
]  # fmt: skip
