"""What a checkpoint can be rejected for."""

from __future__ import annotations


class UnsupportedModel(Exception):
    """The checkpoint is of a family, or uses an option, that this engine does not run."""
