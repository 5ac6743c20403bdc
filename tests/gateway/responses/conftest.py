"""A node that makes responses."""

from __future__ import annotations

from .responding_node import node

__all__ = ["node"]
