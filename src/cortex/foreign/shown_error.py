"""What a client sees of a foreign server's error about its request: the text, without what is not the client's to know.

That is where the server is, the operator's account there, the requests that the server has numbered, and the names of
models that the client did not use.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Final

import msgspec

from cortex.wire import errors
from cortex.wire.error_encoding import BY_CODE
from cortex.wire.errors import CortexError, shorten

MAX_TEXT: Final = 600
ABOUT_REQUESTS: Final[dict[int, type[CortexError]]] = {
    400: errors.InvalidValue,
    413: errors.BodyTooLarge,
    415: errors.UnsupportedMediaType,
    422: errors.InvalidValue,
}
"""The statuses of such errors, and ours."""
_REMOVED: Final = "…"
_TOO_LONG: Final = re.compile(
    r"(?i)maximum context|context (?:length|window|size)|prompt is too long|too many (?:input )?tokens|exceed_context"
)
_PARAM: Final = re.compile(r"[A-Za-z_][\w.\[\]-]{0,99}")
_ID: Final = r"(?=[\w-]*\d|[\w-]{16})[\w-]{4,}"
_PRIVATE: Final = re.compile(
    rf"""
      (?<![\w+.-])[a-z][a-z0-9+.-]*://[^\s"'<>()\[\]{{}},]+                                   # an address
    | (?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+                                                # a mail address
    | \b(?:\d{{1,3}}\.){{3}}\d{{1,3}}(?::\d+)?\b | (?:[0-9a-f]{{1,4}}:){{3,}}[0-9a-f:]+ | \[::[0-9a-f]*\](?::\d+)?
    | (?:\blocalhost\b(?::\d+)? | (?<![\w.-])[a-z][\w.-]*:\d{{3,5}}\b             # a host and its port
       | (?<![\w.-])(?:[a-z0-9][a-z0-9-]*\.)+(?:com|net|org|io|ai|dev|app|cloud|local|internal|lan|corp|svc|home|edu|gov
                                               |eu|de|uk|cn)\b(?::\d+)?)(?:/[^\s"'<>()]*)?
    | (?<![\w./])/(?:[\w.@+-]+/)+[\w.@+-]*                                        # a file
    | \b(?:request|trace|session|correlation)[\s_-]?id["']?[\s:=]+["']?[\w.:-]+   # the server's name of the request
    | \b(?:account|tenant|organi[sz]ation|project|subscription|deployment|workspace|team)["']?[\s:=]+["']?{_ID}
    | \b(?:org|proj)[-_][\w-]{{5,}}
    | \b(?:sk|pk|rk|ak|user|req|request|acct|cus|asst|chatcmpl|cmpl|resp|gen|run|team|ws|file|batch)[-_]{_ID}
    | \b[0-9a-f]{{8}}-[0-9a-f]{{4}}-[0-9a-f]{{4}}-[0-9a-f]{{4}}-[0-9a-f]{{12}}\b
    | (?<![\w-])(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{{20,}}                                # a key, or an id
    """,
    re.IGNORECASE | re.VERBOSE,
)


def shown_text(text: str, model: str, name: str, hidden: Collection[str] = ()) -> str:
    """`text` as the client may see it. `model`: what the server was sent for the client's `name`. `hidden`: other
    models, of which it may not know."""
    if len(text) > 2 * MAX_TEXT:
        text = text[: 2 * MAX_TEXT].rpartition(" ")[0]  # half a key would not be recognised
    text = " ".join(text.split())
    folded = text.casefold()  # a server may have thousands of models, and a pattern takes far longer than a comparison
    named = {secret for secret in (model, *hidden) if secret.casefold() in folded}
    for secret in sorted(named - {name, ""}, key=len, reverse=True):
        pattern = rf"(?<![\w./-]){re.escape(secret)}(?:[-@:][\w.-]*\w)?(?![\w/])"
        text = re.sub(pattern, (lambda _: "\0") if secret == model else (lambda _: _REMOVED), text, flags=re.IGNORECASE)
    text = _PRIVATE.sub(_REMOVED, text)
    return shorten(text.replace("\0", name), MAX_TEXT)


def shown_error(status: int, body: bytes, model: str, name: str, hidden: Collection[str] = ()) -> CortexError:
    """The error of a response whose status is one of `ABOUT_REQUESTS`. Its own status does not depend on `body`."""
    kind = ABOUT_REQUESTS[status]
    message, code, param = _read(body)
    named = BY_CODE.get(code) or (errors.ContextLengthExceeded if _TOO_LONG.search(f"{message} {code}") else kind)
    if named.status == kind.status and named.openai_type == kind.openai_type:
        kind = named
    text = shown_text(message, model, name, hidden) or "The model's server rejects the request."
    return kind(text, param=param if _PARAM.fullmatch(param) else None)


def _read(body: bytes) -> tuple[str, str, str]:
    """Message, code and parameter of an error, in the shapes that servers use; empty where there is none."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", "", ""  # a page of a proxy, for example
    error = found.get("error", found) if isinstance(found, dict) else found
    if not isinstance(error, dict):
        return _text(error), "", ""
    message, code, param = (_text(error.get(key)) for key in ("message", "code", "param"))
    detail = error.get("detail")
    if isinstance(detail, list) and detail and isinstance(detail[0], dict):  # of pydantic
        place = detail[0].get("loc")
        parts = [str(part) for part in place if part != "body"] if isinstance(place, list) else []
        return message or _text(detail[0].get("msg")), code, param or ".".join(parts)
    return message or _text(detail) or _text(error.get("error")), code or _text(error.get("type")), param


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
