"""Requests to the sign-in provider, in a process of their own (`functions` of a `Helper`): only ending it bounds the
time that a name, a handshake or a response that never ends may take."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any

from cortex.ipc.channel import ChannelMessage
from cortex.wire.errors import UpstreamUnavailable

_MAX_BYTES = 1 << 20


class ProviderResponse(ChannelMessage, frozen=True):
    status: int
    content: bytes


def request(url: str, headers: dict[str, str], timeout_s: float, body: bytes) -> ProviderResponse:
    """The response, cut at `_MAX_BYTES`. `body` is posted unless it is empty; `timeout_s` bounds each wait, not their
    sum. Raises UpstreamUnavailable if there is no response."""
    if not url.startswith(("https://", "http://")):
        raise UpstreamUnavailable("The sign-in provider names an address that is neither https nor http.")
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body or None, headers), timeout=timeout_s) as response:
            return ProviderResponse(response.status, response.read(_MAX_BYTES))
    except urllib.error.HTTPError as rejection:
        with rejection:
            return ProviderResponse(rejection.code, rejection.read(_MAX_BYTES))
    except (OSError, ValueError, HTTPException) as problem:
        raise UpstreamUnavailable(f"The sign-in provider does not respond: {problem}") from problem


def functions() -> dict[str, Callable[..., Any]]:
    return {"request": request}
