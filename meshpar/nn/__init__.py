"""Layers of meshpar's own models, and what finds their operations in others' models."""

import lazy_loader

__getattr__, __dir__, _ = lazy_loader.attach(__name__, submodules=["attention", "experts"])
