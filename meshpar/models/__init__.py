"""The built-in models, chosen by `kind`."""

from typing import Annotated

import pydantic

from meshpar.models.gpt import GPT
from meshpar.models.llama import Llama

Model = Annotated[Llama | GPT, pydantic.Field(discriminator="kind")]

__all__ = ["GPT", "Llama", "Model"]
