"""The names of a model: a path, or `owner/name`, `owner/name:Q4_K_M`, `owner/name@revision`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cortex.neuron.weights.errors import FilesMissing

DEFAULT_REVISION: Final = "main"

_WORD: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_-])?"
_SOURCE: Final = re.compile(
    rf"(?P<repository>{_WORD}/{_WORD})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{{0,127}}))?(?::(?P<quant>[\w.-]{{1,200}}))?"
)


@dataclass(frozen=True, slots=True)
class HubSource:
    """A model on the hub. `quant` selects one of the repository's GGUF models."""

    repository: str
    revision: str = DEFAULT_REVISION
    quant: str | None = None


def is_hub_id(text: str) -> bool:
    """Whether `text` is `owner/name` and nothing else."""
    match = _SOURCE.fullmatch(text)
    return match is not None and match["repository"] == text and ".." not in text


def parse_source(source: str) -> Path | HubSource:
    """The local path or hub model that `source` names. Raises FilesMissing when it can be neither."""
    path = Path(source).expanduser()
    if source and path.exists():
        return path
    match = _SOURCE.fullmatch(source)
    if match is None or ".." in source:
        raise FilesMissing(f"{source!r} does not exist; name a model directory, a .gguf file or owner/name on the hub")
    return HubSource(match["repository"], match["revision"] or DEFAULT_REVISION, match["quant"])


_DEFAULT: Final = "https://huggingface.co"


def endpoint_of(environment: Mapping[str, str]) -> str:
    """The URL of the hub or of its mirror, without a slash at the end."""
    return (environment.get("HF_ENDPOINT") or _DEFAULT).rstrip("/")


def is_offline(environment: Mapping[str, str]) -> bool:
    """Whether `HF_HUB_OFFLINE` forbids the use of the hub."""
    return environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
