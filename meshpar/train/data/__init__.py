"""What a run trains on."""

from typing import Annotated

from pydantic import Field

from meshpar.train.data.corpus import Dataset, StandardLibrary, Synthetic, Text

__all__ = ["Data", "Dataset", "StandardLibrary", "Synthetic", "Text"]

Data = Annotated[Text | StandardLibrary | Synthetic, Field(discriminator="kind")]
