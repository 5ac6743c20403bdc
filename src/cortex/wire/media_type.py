"""Media types and the parameters behind them, read strictly: what two servers could read differently is rejected."""

from __future__ import annotations

import re
from typing import NamedTuple

from cortex.wire.errors import UnsupportedMediaType, shorten

_TOKEN = r"[!#$%&'+.^_`|~0-9A-Za-z-]+"
"""Without `*`, which marks parameters that only some servers read (`boundary*=`, `boundary*0=`)."""
_KIND = re.compile(rf"({_TOKEN}/{_TOKEN})[ \t]*", re.ASCII)
_PARAMETER = re.compile(rf';[ \t]*(?:({_TOKEN}\*?)=(?:({_TOKEN})|"((?:[^"\\]|\\.)*)"))?[ \t]*', re.ASCII)


class MediaType(NamedTuple):
    kind: str
    """Lower-case, such as `application/json`."""
    parameters: dict[str, str]
    """By lower-case name."""

    def check_charset(self) -> None:
        """Raises UnsupportedMediaType for text that is not UTF-8."""
        charset = self.parameters.get("charset", "utf-8")
        if charset.lower() not in ("utf-8", "utf8", "us-ascii"):
            raise UnsupportedMediaType(f"The charset '{shorten(charset)}' is not read here; send UTF-8.")


def parse_media_type(text: str) -> MediaType:
    """Raises UnsupportedMediaType."""
    found = _KIND.match(text)
    parameters = None if found is None or not _is_plain(text) else parse_parameters(text[found.end() :])
    if found is None or parameters is None:
        raise UnsupportedMediaType(
            f"'{shorten(text)}' is not a plain media type; send one type, with each parameter once."
        )
    return MediaType(found[1].lower(), parameters)


def parse_parameters(text: str) -> dict[str, str] | None:
    """The parameters of a header, `; name=value` each; None where they could be read in another way. Only a name that
    ends with `*`, whose value is encoded, may be next to the same name without it."""
    parameters: dict[str, str] = {}
    position = 0
    while position < len(text):
        found = _PARAMETER.match(text, position)
        if found is None:
            return None
        position = found.end()
        if found[1] is not None:
            name = found[1].lower()
            if name in parameters:
                return None
            parameters[name] = found[2] if found[2] is not None else re.sub(r"\\(.)", r"\1", found[3])
    return parameters


def _is_plain(text: str) -> bool:
    """No parameter of a media type is encoded or has escapes."""
    return "*" not in text and "\\" not in text and text.isascii() and text.isprintable()
