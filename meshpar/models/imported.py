"""The config of a user's own model; `meshpar.interop.flax_model` imports it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from meshpar.config import Config, Target


class Import(Config):
    """A Flax model that a user's function returns.

    >>> Import(target="my_package.my_module:build", arguments={"width": 64}).target
    'my_package.my_module:build'
    """

    kind: Literal["import"] = "import"
    target: Target
    """`package.module:name` of a function that returns a Linen module, or of an NNX module's class or a function that
    returns one; NNX's is called with `rngs`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the target."""
    dims: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Path glob -> a name for each dim of the matching parameters; overrides what the model declares."""
    activation_dims: tuple[str, ...] = ()
    """Names of dims that only activations have; rules may use them."""
    axes: dict[str, str] = Field(default_factory=dict)
    """The model's own name of a mesh axis -> meshpar's, `{tp: tensor}`, for a model that names axes instead of dims."""
