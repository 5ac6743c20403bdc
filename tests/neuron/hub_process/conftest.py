"""A client of the fake hub, without a proxy between them."""

from __future__ import annotations

import pytest

from .hub_client import Sleeps, client, in_this_process, real_process, sleeps

__all__ = ["client", "in_this_process", "real_process", "sleeps"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, in_this_process: None, sleeps: Sleeps) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
