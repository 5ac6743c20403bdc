"""Retries without waiting, no proxy between the tests and the fake hub, and a client of it."""

from __future__ import annotations

import pytest

from .hub_client import client

__all__ = ["client"]


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    from cortex.neuron.weights.hub import download, listing

    monkeypatch.setattr(download, "BACKOFF_S", 0.001)
    monkeypatch.setattr(listing, "BACKOFF_S", 0.001)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
