"""A model of the user's own, named by a config; what it is, `meshpar.interop.flax_model` says."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from meshpar.config import Config, Target


class Import(Config):
    """A Flax model that a function of the user's makes.

    >>> Import(target="my_package.my_module:build", arguments={"width": 64}).target
    'my_package.my_module:build'
    """

    kind: Literal["import"] = "import"
    target: Target
    """`package.module:name` of a function that gives a Linen module; or of an NNX module's class, or a function like
    it, which is called with `rngs`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """What it is called with, by name."""
    dims: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Path glob -> a name for each dim of the parameters that it matches; goes before what the model declares."""
    activation_dims: tuple[str, ...] = ()
    """Names that only activations have: rules may name them too."""
    axes: dict[str, str] = Field(default_factory=dict)
    """The model's own name of a mesh axis -> meshpar's, `{tp: tensor}`, for a model that names axes and not dims."""
