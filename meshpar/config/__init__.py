"""Typed, frozen config models that are read from YAML and `key=value` overrides. Independent of all components.

A config file is data: a mapping, whose key `extends: other.yaml` may name another file. All problems in files and on
the command line are reported at once, by dotted path, file and line.
"""

from meshpar.config.coerced import Coerced, DataPath, FilePath, PathText, RunPath, Section, Strings, default
from meshpar.config.files import read_text
from meshpar.config.flat import changed, flatten, flatten_json
from meshpar.config.json_schema import schema
from meshpar.config.loading import build, load
from meshpar.config.model import Config, Count, Positive, Seed, Target
from meshpar.config.yaml_text import to_yaml

__all__ = [
    "Coerced", "Config", "Count", "DataPath", "FilePath", "PathText", "Positive", "RunPath", "Section", "Seed",
    "Strings", "Target", "build", "changed", "default", "flatten", "flatten_json", "load", "read_text", "schema",
    "to_yaml",
]  # fmt: skip
