"""Requests the listing of a repository. Runs in the hub process."""

from __future__ import annotations

import time
import urllib.parse
from typing import Final

from huggingface_hub import get_session
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # its documentation names it here

from cortex.neuron.hub_process.rejection import Interrupted, interruption, rejection
from cortex.neuron.weights.errors import HubError, HubUnreachable
from cortex.neuron.weights.hub.listing import MAX_LISTING_BYTES, Listing, parse_listing

_NUM_ATTEMPTS: Final = 3
_BACKOFF_S: Final = 0.5
_MAX_BACKOFF_S: Final = 15.0
_TIMEOUT_S: Final = 20.0


def fetch_listing(endpoint: str, repository: str, revision: str) -> Listing:
    """Raises NotOnHub when the hub rejects the request, HubUnreachable when there is no usable response."""
    url = f"{endpoint}/api/models/{repository}/revision/{urllib.parse.quote(revision, safe='')}?blobs=true"
    num_failed = 0
    while True:
        try:
            return parse_listing(_read(url, repository), endpoint)
        except Interrupted as error:
            num_failed += 1
            if num_failed == _NUM_ATTEMPTS or error.retry_after_s > _MAX_BACKOFF_S:
                raise HubUnreachable(f"{endpoint} cannot be used ({error}); {error.remedy}") from error
            time.sleep(max(error.retry_after_s, _BACKOFF_S * 2 ** (num_failed - 1)))


def _read(url: str, repository: str) -> bytes:
    """The body of the response, up to one byte over the limit. Raises NotOnHub or Interrupted."""
    body = bytearray()
    try:
        with get_session().stream("GET", url, headers=build_hf_headers(), timeout=_TIMEOUT_S) as response:
            if response.status_code != 200:
                raise rejection(response.status_code, response.headers, repository)
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > MAX_LISTING_BYTES:
                    break
    except (HubError, Interrupted):
        raise
    except Exception as error:  # the client does not say which library talks HTTP
        raise interruption(error, repository) from error
    return bytes(body)
