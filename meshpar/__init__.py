"""meshpar: declare a mesh and a name for each dim; train on any layout of devices, with the same numbers.

The public names are listed in `__init__.pyi`; each is imported at its first use.
"""

import sys
from typing import Any

import lazy_loader

_public, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("meshpar")
    if name in __all__:
        return _public(name)
    from importlib.util import find_spec

    if find_spec(f"{__name__}.{name}"):  # a module that was not imported yet; `from meshpar import` imports it
        raise AttributeError(name)
    from meshpar.errors import suggestion
    from meshpar.synonyms import public_name

    message = f"meshpar has no {name}: {public_name(name) or suggestion(name, __all__, 'dir(meshpar) lists its names')}"
    # Of `from meshpar import Name`, Python would replace the text of an AttributeError by one without advice.
    if sys._getframe(1).f_code.co_name == "_handle_fromlist":
        raise ImportError(message, name=name)
    raise AttributeError(message, name=name)
