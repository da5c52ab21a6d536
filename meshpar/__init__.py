"""meshpar: declare a mesh and a name for each dim; train on any layout of devices, with the same numbers.

The public names are listed in `__init__.pyi`; each is imported at its first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
