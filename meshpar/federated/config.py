"""The config of a run of federated learning."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import pydantic

from meshpar.config import Coerced, Config, FilePath, Positive, Section, Seed, default
from meshpar.federated.data import AnySource, Clients
from meshpar.federated.methods import AnyMethod, FedAvg, Scaffold
from meshpar.federated.model import Classifier
from meshpar.federated.privacy import Privacy
from meshpar.federated.secure import SecureSum
from meshpar.mesh.layout import MeshLayout

AXES = ("data",)
"""The axes over which clients are sharded."""
Probability = Annotated[float, pydantic.Field(ge=0, le=1)]


class Local(Config):
    """The local training of a client: SGD."""

    lr: Annotated[float, pydantic.Field(gt=0)]
    """The learning rate."""
    epochs: Positive = 1
    """Passes over the client's examples in a round."""
    batch_size: Positive = 10
    """Examples per step; the last step of an epoch may have fewer."""

    def num_steps(self, num_examples: int) -> int:
        return self.epochs * math.ceil(num_examples / self.batch_size)


class Stragglers(Config):
    """Clients that are too slow to complete their local training."""

    rate: Probability
    """The probability that a client is slow in a round."""
    work: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.5
    """The fraction of its steps that a slow client makes; their number is rounded down."""
    late: Literal["use", "drop"] = "use"
    """Whether the server uses the update of a slow client, or drops it."""


class Federated(Config):
    """A run of federated learning: everything that its config file specifies."""

    data: Section[AnySource]
    """The examples: `digits`, or `{kind: clusters, num_examples: 4000}`."""
    clients: Coerced[Clients, int | dict[str, Any]] = default(Clients())
    """The number of clients, and how the examples are divided among them."""
    model: Coerced[Classifier, list[int] | dict[str, Any]] = default(Classifier())
    """The widths of the hidden layers; default: none."""
    method: Coerced[AnyMethod, str | dict[str, Any]] = default(FedAvg())
    """`fedavg`, `{kind: fedprox, mu: 0.1}`, `{kind: fedadam, server_lr: 0.01}` or `scaffold`."""
    local: Section[Local]
    """The local training of a client in a round."""
    clients_per_round: Positive = 10
    """The number of clients that take part in a round."""
    num_rounds: Positive
    """The number of rounds of the whole run."""
    weights: Literal["examples", "uniform"] | None = None
    """Whether an update counts by the number of its client's examples. Default: `examples`; `uniform` for SCAFFOLD and
    with privacy."""
    dropout: Probability = 0.0
    """The probability that a client sends nothing in a round."""
    stragglers: Section[Stragglers | None] = default(None)
    """Clients that make only a part of their steps. Default: none."""
    privacy: Section[Privacy | None] = default(None)
    """Differential privacy of clients. Default: none."""
    secure_sum: Section[SecureSum | None] = default(None)
    """Sums updates as masked integers. Default: updates are summed as floats."""
    mesh: Section[MeshLayout] = default(MeshLayout(data=-1))
    """Clients are sharded over axis `data`; all others have size 1."""
    clients_at_once: Positive = 32
    """The largest number of clients that a device computes at once."""
    dtype: Literal["float32", "float64"] = "float32"
    """Dtype of parameters, updates and products."""
    seed: Seed = 0
    """Determines the first parameters, cohorts, orders of examples and noise."""
    run_dir: FilePath
    """Local directory for records, checkpoints and the last parameters. A run resumes from its last checkpoint."""
    eval_every: Positive = 10
    """Rounds between evaluations on held-out examples."""

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Federated:
        if self.clients_per_round > self.clients.num:
            raise ValueError(
                f"clients_per_round={self.clients_per_round}, but clients.num={self.clients.num}; sample fewer"
            )
        if others := [axis for axis, size in self.mesh.sizes.items() if size != 1 and axis not in AXES]:
            raise ValueError(f"mesh.{others[0]}: clients are sharded over data alone; set mesh.data")
        if self.mesh.dcn:
            raise ValueError("mesh.dcn: clients are sharded over data alone; set mesh.data")
        if self.privacy and self.weights == "examples":
            what = "one client could change the mean by any amount"
            raise ValueError(f"weights=examples with privacy: {what}; set weights=uniform")
        if self.privacy and isinstance(self.method, Scaffold):
            raise ValueError("privacy with scaffold: control variates get no noise; choose another method")
        if self.secure_sum and self.clients_per_round < 2:
            raise ValueError("secure_sum needs two clients, which share a mask; set clients_per_round")
        return self

    @property
    def weighting(self) -> Literal["examples", "uniform", "fixed"]:
        """How updates are weighted, `fixed`: by 1 / clients_per_round."""
        if self.privacy:
            return "fixed"
        return self.weights or ("uniform" if isinstance(self.method, Scaffold) else "examples")
