"""Data sets of labelled examples, and their division among clients."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
import pydantic

from meshpar.config import Config, Positive, Section, Seed, default
from meshpar.errors import ConfigError

NonNegative = Annotated[float, pydantic.Field(ge=0)]


class Examples(NamedTuple):
    """Labelled examples.

    Args:
      x: float64 [num, features].
      y: int32 [num], 0 to the number of classes - 1.
    """

    x: np.ndarray
    y: np.ndarray

    @property
    def num_classes(self) -> int:
        return int(self.y.max()) + 1

    def some(self, indices: np.ndarray | slice) -> Examples:
        return Examples(self.x[indices], self.y[indices])


class Source(Config):
    """A data set of labelled examples."""

    shorthand: ClassVar = "kind"
    held_out: Positive = 360
    """Number of examples that no client has. The server evaluates on them."""
    seed: Seed = 0
    """Determines the examples, or their order."""

    @abstractmethod
    def examples(self) -> Examples:
        """All examples, in random order."""

    def read(self) -> tuple[Examples, Examples]:
        """Returns the examples of all clients, and the held-out examples.

        Raises:
          ConfigError: all examples are held out; or a package is not installed.
        """
        found = self.examples()
        if self.held_out >= len(found.y):
            raise ConfigError(f"data.held_out: {self.held_out} of {len(found.y)} examples are held out: none is left")
        return found.some(slice(self.held_out, None)), found.some(slice(self.held_out))


class Digits(Source):
    """The 1797 handwritten digits of scikit-learn, 8 x 8 pixels from 0 to 1."""

    kind: Literal["digits"] = "digits"

    def examples(self) -> Examples:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise ConfigError("data.kind: digits needs scikit-learn; pip install scikit-learn") from None
        x, y = (np.asarray(one) for one in load_digits(return_X_y=True))  # not data frames, to a type checker
        order = np.random.default_rng(self.seed).permutation(len(y))
        return Examples(x[order] / 16, y[order].astype(np.int32))


class Clusters(Source):
    """Normally distributed examples around the random centre of each class."""

    kind: Literal["clusters"] = "clusters"
    num_examples: Positive = 4000
    """The number of examples, held-out ones included."""
    num_features: Positive = 16
    """The length of an example's vector."""
    num_classes: Positive = 10
    """The number of classes, each with a centre of its own."""
    spread: NonNegative = 1.0
    """Standard deviation of the examples around a centre; that of the centres is 1."""

    def examples(self) -> Examples:
        rng = np.random.default_rng(self.seed)
        y = rng.integers(self.num_classes, size=self.num_examples)
        centres = rng.normal(size=(self.num_classes, self.num_features))
        x = centres[y] + self.spread * rng.normal(size=(self.num_examples, self.num_features))
        return Examples(x, y.astype(np.int32))


AnySource = Annotated[Digits | Clusters, pydantic.Field(discriminator="kind")]


class Same(Config):
    """Every client draws from the same distribution."""

    shorthand: ClassVar = "kind"
    kind: Literal["iid"] = "iid"

    def mixes(self, prior: np.ndarray, num: int, rng: np.random.Generator) -> np.ndarray:
        """float [num, classes], the proportions of classes from which each client draws."""
        return np.tile(prior, (num, 1))


class Dirichlet(Config):
    """Every client has its own proportions of classes, from a Dirichlet distribution around those of the data.

    Source: Hsu et al. 2019, arXiv:1909.06335.
    """

    kind: Literal["dirichlet"] = "dirichlet"
    alpha: Annotated[float, pydantic.Field(gt=0)] = 0.5
    """Concentration: small for few classes a client, large for equal proportions."""

    def mixes(self, prior: np.ndarray, num: int, rng: np.random.Generator) -> np.ndarray:
        return rng.dirichlet(self.alpha * prior * len(prior), num)


class Clients(Config):
    """How examples are divided among clients. Each example has one client, and each client at least one example."""

    shorthand: ClassVar = "num"
    num: Positive = 100
    """The number of clients."""
    split: Section[Annotated[Same | Dirichlet, pydantic.Field(discriminator="kind")]] = default(Same())
    """`iid`, or `{kind: dirichlet, alpha: 0.3}`."""
    size_spread: NonNegative = 0.0
    """Standard deviation of the logarithm of a client's number of examples."""
    seed: Seed = 0
    """Determines which examples a client has."""

    def divide(self, labels: np.ndarray) -> list[np.ndarray]:
        """The examples of each client, int[...], sorted.

        Raises:
          ConfigError: there are more clients than examples.
        """
        if self.num > len(labels):
            raise ConfigError(f"clients.num: {self.num} clients cannot share {len(labels)} examples")
        rng = np.random.default_rng(self.seed)
        pools = [rng.permutation(np.flatnonzero(labels == c)).tolist() for c in range(labels.max() + 1)]
        left = np.array([len(pool) for pool in pools], float)
        mixes = self.split.mixes(left / left.sum(), self.num, rng)
        owned: list[np.ndarray] = []
        for size, mix in zip(self._sizes(len(labels), rng), mixes, strict=True):
            own = []
            for _ in range(size):
                wanted = np.where(left > 0, mix, 0)
                if wanted.sum() == 0:  # the classes of this client are used up
                    wanted = left
                label = rng.choice(len(pools), p=wanted / wanted.sum())
                left[label] -= 1
                own.append(pools[label].pop())
            owned.append(np.sort(own))
        return owned

    def _sizes(self, num_examples: int, rng: np.random.Generator) -> np.ndarray:
        """int [num], the number of examples of each client, at least 1."""
        shares = np.exp(self.size_spread * rng.normal(size=self.num))
        ends = np.round(np.cumsum(shares) / shares.sum() * (num_examples - self.num)).astype(int)
        return 1 + np.diff(ends, prepend=0)
