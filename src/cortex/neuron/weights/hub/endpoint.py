"""Which hub the environment names, and whether it may be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_DEFAULT: Final = "https://huggingface.co"


def endpoint_of(environment: Mapping[str, str]) -> str:
    """The URL of the hub or of its mirror, without a slash at the end."""
    return (environment.get("HF_ENDPOINT") or _DEFAULT).rstrip("/")


def is_offline(environment: Mapping[str, str]) -> bool:
    """Whether `HF_HUB_OFFLINE` forbids the use of the hub."""
    return environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
