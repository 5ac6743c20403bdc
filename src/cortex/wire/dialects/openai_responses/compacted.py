"""The content of a compaction item: a summary, opaque to clients and not secret."""

from __future__ import annotations

import base64
import binascii

_MARK = "cortex-summary-1."
_HEADING = "Summary of the conversation before this point:\n\n"


def encoded(summary: str) -> str:
    """The content of the item."""
    return _MARK + base64.b64encode(summary.encode()).decode()


def shown(content: str) -> str | None:
    """What a model sees in place of the item; None for content that is not ours."""
    if not content.startswith(_MARK):
        return None
    try:
        return _HEADING + base64.b64decode(content.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
