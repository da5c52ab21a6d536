"""The built-in models, and the user's own, chosen by `kind`."""

from typing import Annotated

import pydantic

from meshpar.models.gpt import GPT
from meshpar.models.imported import Import
from meshpar.models.llama import Llama

Model = Annotated[Llama | GPT | Import, pydantic.Field(discriminator="kind")]

__all__ = ["GPT", "Import", "Llama", "Model"]
