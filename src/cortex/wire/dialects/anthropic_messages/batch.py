"""The body of `POST /v1/messages/batches`: requests for `/v1/messages`, each with an id of its client."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec
from msgspec import Raw

from cortex.wire.errors import InvalidValue
from cortex.wire.fields.body import decode

PATH = "/v1/messages"
_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class _Request(msgspec.Struct, frozen=True):
    custom_id: str
    params: Raw


class _Batch(msgspec.Struct, frozen=True):
    requests: list[_Request]


class Requests(NamedTuple):
    """The requests of a batch, as lines in the format of OpenAI's batches."""

    text: bytes
    num_lines: int


def parse_batch(max_lines: int, body: bytes) -> Requests:
    """Raises InvalidValue or MalformedJSON."""
    requests = decode(body, _Batch).requests
    if not 1 <= len(requests) <= max_lines:
        raise InvalidValue(f"requests: a batch has 1 to {max_lines} (batches.max_lines).", param="requests")
    seen: set[str] = set()
    lines = []
    for number, request in enumerate(requests):
        param = f"requests.{number}.custom_id"
        if not _ID.fullmatch(request.custom_id):
            raise InvalidValue(f"{param}: use 1 to 64 letters, digits, _ or -.", param=param)
        if request.custom_id in seen:
            raise InvalidValue(f"{param}: an earlier request has the same.", param=param)
        seen.add(request.custom_id)
        line = {"custom_id": request.custom_id, "method": "POST", "url": PATH, "body": request.params}
        lines.append(msgspec.json.encode(line) + b"\n")
    return Requests(b"".join(lines), len(lines))
