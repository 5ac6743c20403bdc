"""The functions of the hub process. What the hub does not give is returned as a `Failed`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from cortex.neuron.hub_process.protocol import Failed, FetchFiles
from cortex.neuron.hub_process.remote_listing import fetch_listing
from cortex.neuron.hub_process.transfer import fetch_files
from cortex.neuron.weights.errors import HubError
from cortex.neuron.weights.hub.listing import Listing

T = TypeVar("T")

log = logging.getLogger(__name__)


def functions() -> dict[str, Callable[..., Any]]:
    client_log = logging.getLogger("huggingface_hub")  # its own handler writes in a format of its own
    client_log.handlers.clear()
    client_log.propagate = True
    return {"list_files": list_files, "fetch": fetch}


def list_files(endpoint: str, repository: str, revision: str) -> Listing | Failed:
    """The listing of a repository."""
    return _answered(lambda: fetch_listing(endpoint, repository, revision))


def fetch(request: FetchFiles) -> Failed | None:
    """Files in the cache, verified and linked into the commit's snapshot."""
    return _answered(lambda: fetch_files(request))


def _answered(ask: Callable[[], T]) -> T | Failed:
    try:
        return ask()
    except HubError as error:
        return Failed.of(error)
    except Exception as error:
        log.exception("a request to the hub failed unexpectedly")
        return Failed.of(HubError(f"{type(error).__name__}: {error}; see the node's log"))
