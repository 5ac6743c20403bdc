"""Reads the pictures in a body: `data:` URLs, base64 texts and addresses. And the errors about them."""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator, Sequence
from typing import Final

from cortex.wire.errors import InvalidValue, UnsupportedModality, shorten
from cortex.wire.fields.body import Fields
from cortex.wire.requests import Detail, PicturePart

_DETAILS: Final[dict[str, Detail]] = {"auto": "auto", "low": "low", "high": "high", "original": "high"}
_DATA_URL = re.compile(r"\s*data:(?P<media_type>[^,;]*)(?P<options>(?:;[^,;]*)*),", re.IGNORECASE)
_ADDRESS = re.compile(r"\s*https?://", re.IGNORECASE)
_MAX_DATA_URL_HEAD = 256
_MAX_NAMED = 8
_SPACES = str.maketrans("", "", " \t\r\n")


PICTURE_PARTS: Final = ("image_url", "input_image")
"""Types of the parts of OpenAI's dialects that are pictures."""


def picture_urls(fields: Fields, name: str) -> Iterator[str]:
    """The URLs of those parts of an array that are pictures. Raises InvalidValue."""
    for part in fields.objects(name):
        if part.text("type") in PICTURE_PARTS:
            yield _url_and_holder(part)[0]


def read_url_part(part: Fields) -> PicturePart:
    """A part of OpenAI's dialects: `image_url` is a URL, or an object with `url` and `detail`."""
    url, holder = _url_and_holder(part)
    return _with_detail(from_url(url, part.path), holder if "detail" in holder else part)


def _url_and_holder(part: Fields) -> tuple[str, Fields]:
    if part.raw("file_id") is not None and part.raw("image_url") is None:
        raise part.invalid("file_id", "no files are stored here; send the picture as a `data:` URL in 'image_url'")
    holder = part.object("image_url") if isinstance(part.raw("image_url"), dict) else None
    return (part.required_text("image_url"), part) if holder is None else (holder.required_text("url"), holder)


def from_url(url: str, param: str) -> PicturePart:
    """The picture of a `data:` URL, or at an address. Raises InvalidValue."""
    if _ADDRESS.match(url):
        return PicturePart(url=url.strip(), param=param)
    head = _DATA_URL.match(url[:_MAX_DATA_URL_HEAD])
    if head is None:
        raise invalid(param, f"{shorten(url)!r} is not a picture; send a `data:` URL with base64")
    if ";base64" not in head["options"].lower():
        raise invalid(param, "the `data:` URL is not in base64; send `data:image/png;base64,…`")
    return from_base64(url[head.end() :], head["media_type"], param)


def from_base64(text: str, media_type: str, param: str) -> PicturePart:
    """The picture of a file in base64. Its type is found from the file itself, whatever was declared. Raises
    InvalidValue."""
    try:
        # Surrogates and other text that is not ASCII raise ValueError, as malformed base64 does.
        data = binascii.a2b_base64(_padded(text), strict_mode=True)
    except ValueError:
        raise invalid(param, "the picture is not valid base64") from None
    if not data:
        raise invalid(param, "the picture is empty")
    return PicturePart(data=data, media_type=media_type.strip().lower(), param=param)


def invalid(param: str, problem: str) -> InvalidValue:
    return InvalidValue(f"Invalid value for '{shorten(param)}': {problem}.", param=shorten(param))


def reads_text_only(model: str, others: Sequence[str], param: str) -> UnsupportedModality:
    """`others`: the models that the client could send the pictures to."""
    named = list(others[:_MAX_NAMED])
    if named:
        more = f" and {len(others) - len(named)} more" if len(others) > len(named) else ""
        advice = f"send them to {', '.join(named)}{more}, or remove them"
    else:
        advice = "remove them, or choose a model that GET /v1/models lists with vision"
    return UnsupportedModality(
        f"{model} reads text only, and the request has pictures; {advice}.", param=param, details={"models": named}
    )


def _padded(text: str) -> str:
    """Without line breaks, and with the padding that some clients leave out."""
    if "\n" in text or "\r" in text or " " in text:
        text = text.translate(_SPACES)
    if "-" in text or "_" in text:
        text = text.replace("-", "+").replace("_", "/")  # the alphabet for URLs
    return text + "=" * (-len(text) % 4)


def _with_detail(picture: PicturePart, fields: Fields) -> PicturePart:
    given = fields.text("detail")
    if given is None:
        return picture
    detail = _DETAILS.get(given)
    if detail is None:
        raise fields.invalid("detail", f"'{shorten(given)}' is not known; choose {', '.join(_DETAILS)}")
    return PicturePart(
        data=picture.data, media_type=picture.media_type, url=picture.url, detail=detail, param=picture.param
    )
