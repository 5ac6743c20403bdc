"""Errors as Ollama's clients expect them."""

from __future__ import annotations

from typing import Any

from cortex.wire.error_encoding import Family
from cortex.wire.errors import CortexError


def _envelope(error: CortexError) -> dict[str, Any]:
    return {"error": error.message, "code": error.code}


OLLAMA = Family("ollama", _envelope, prefix="/api/", declares_bodies=False, reports_durations=True)
