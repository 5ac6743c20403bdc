"""Requests the listing of a repository, and says what an error response of the hub means: a retry may help, or not.
Runs in the hub process."""

from __future__ import annotations

import re
import time
import urllib.parse
from collections.abc import Mapping
from typing import Final

from huggingface_hub import get_session
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # its documentation names it here

from cortex.neuron.weights.errors import HubError, HubUnreachable, NotOnHub
from cortex.neuron.weights.hub.listing import MAX_LISTING_BYTES, Listing, parse_listing

_NUM_ATTEMPTS: Final = 3
_BACKOFF_S: Final = 0.5
_MAX_BACKOFF_S: Final = 15.0
_TIMEOUT_S: Final = 20.0
_SECONDS: Final = re.compile(r"\s*(\d{1,9})\s*")
_RESET: Final = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,9})")


class Interrupted(Exception):
    """The request failed; a retry may help, after `retry_after_s` where the hub named a time."""

    def __init__(self, reason: str, remedy: str = "check the network or HF_ENDPOINT", retry_after_s: float = 0) -> None:
        super().__init__(reason)
        self.remedy = remedy
        self.retry_after_s = retry_after_s


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


def rejection(status: int, headers: Mapping[str, str], repository: str) -> NotOnHub | Interrupted:
    """The exception for an error response, whose headers have names in any case. NotOnHub: a retry would not help."""
    code = headers.get("x-error-code")
    if code == "GatedRepo":
        return NotOnHub(f"{repository} is gated; accept its terms on the hub and set HF_TOKEN")
    if code == "RevisionNotFound":
        return NotOnHub(f"{repository} has no such revision; check the part after the @")
    if status in (401, 403, 404):
        return NotOnHub(
            f"the hub has no {repository} or does not show it ({status}); "
            "check the name, or set HF_TOKEN for a private repository"
        )
    wait_s = _retry_after_s(headers)
    if status == 429:
        soon = f"try again in {wait_s:.0f} s" if wait_s else "try again later"
        return Interrupted("too many requests, 429", f"{soon}, or set HF_TOKEN for a higher limit", wait_s)
    return Interrupted(f"the hub responded with {status}", retry_after_s=wait_s)


def interruption(error: Exception, repository: str) -> NotOnHub | Interrupted:
    """The exception for an error of the hub's client, by whatever library that talks HTTP."""
    response = getattr(error, "response", None)
    if response is not None:
        return rejection(response.status_code, response.headers, repository)
    return Interrupted(str(error).partition("\n")[0] or type(error).__name__)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """The time until the hub accepts requests again, as `retry-after` or `ratelimit: "api";r=0;t=55` name it."""
    match = _SECONDS.fullmatch(headers.get("retry-after", "")) or _RESET.search(headers.get("ratelimit", ""))
    return float(match[1]) if match else 0.0
