"""The base of every configuration type."""

from __future__ import annotations

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a config file: immutable, and nothing it does not know is accepted.

    Subclasses repeat `frozen=True` for the type checker. A string below an attribute is that key's line in the
    reference page. `__post_init__` may raise `ValueError` for what a type cannot say; the loader adds file, line
    and key.
    """
