"""Programs to attack: gateways over fake nodes and the API of a neuron, with the fixtures of their own tests."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from ..gateway.conftest import neurons, spawn, start_gateway
from ..neuron.api.conftest import api, chat_body, keepalive_s, node, node_keys, text, text_files

__all__ = [
    "api",
    "chat_body",
    "keepalive_s",
    "neurons",
    "node",
    "node_keys",
    "scaled",
    "spawn",
    "start_gateway",
    "text",
    "text_files",
]


@pytest.fixture(scope="session")
def scaled() -> Callable[[int, int], int]:
    """Chooses between a small count, for every run, and a full one, for `make hostile`."""
    is_full = os.environ.get("HOSTILE") == "full"
    return lambda small, full: full if is_full else small
