"""The rejection of pictures by a model that reads text only."""

from __future__ import annotations

from collections.abc import Sequence

from cortex.wire.errors import UnsupportedModality

_MAX_NAMED = 8


def reads_text_only(model: str, others: Sequence[str], param: str) -> UnsupportedModality:
    """`others`: the models that the client could send the pictures to."""
    named = list(others[:_MAX_NAMED])
    if named:
        more = f" and {len(others) - len(named)} more" if len(others) > len(named) else ""
        advice = f"send them to {', '.join(named)}{more}, or remove them"
    else:
        advice = "remove them, or choose a model that GET /v1/models lists with vision"
    return UnsupportedModality(
        f"{model} reads text only, and the request has pictures; {advice}.", param=param, details={"models": named}
    )
