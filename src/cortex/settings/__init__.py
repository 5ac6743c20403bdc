"""Typed configuration: a TOML file plus environment overrides, read into frozen values.

Other packages own their config types (subclasses of `Section`). This package reads them, rejects unknown keys and
invalid values with one clear line (`SettingsError`), and writes the reference page from them. Durations and sizes are
plain numbers with the unit in the key: `ttl_s`, `vram_mb`.
"""

from .environment import check_key_variables, check_variables, is_one_key
from .listen import Listen
from .loading import Stamp, load, loads, stamp
from .reference import reference
from .section import Section, SettingsError

__all__ = [
    "Listen",
    "Section",
    "SettingsError",
    "Stamp",
    "check_key_variables",
    "check_variables",
    "is_one_key",
    "load",
    "loads",
    "reference",
    "stamp",
]
