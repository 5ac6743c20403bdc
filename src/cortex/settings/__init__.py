"""Typed configuration: a TOML file plus environment overrides, read into frozen values.

The rooms own their config types (subclasses of `Section`); this package reads them, refuses what
they do not know in one clear line (`SettingsError`), and writes the reference page from them.
Durations and sizes are plain numbers with the unit in the key: `ttl_s`, `vram_mb`.
"""

from .errors import SettingsError
from .listen import Listen
from .loading import load, loads
from .reference import reference
from .section import Section

__all__ = ["Listen", "Section", "SettingsError", "load", "loads", "reference"]
